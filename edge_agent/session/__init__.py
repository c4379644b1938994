"""One session with a verifier: its stream, failover and statistics."""
