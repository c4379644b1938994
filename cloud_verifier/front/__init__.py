"""Serve a verifier over gRPC: admission, streams, registration and metrics."""
