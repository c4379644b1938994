"""The coordinator's gRPC and HTTP interfaces, and the handlers behind them."""
