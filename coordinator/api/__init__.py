"""Serve the coordinator's gRPC and HTTP interfaces, with the handlers behind them."""
