"""The verifier's gRPC front: admission, streams, registration and metrics."""
