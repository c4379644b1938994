"""Drive sessions with verifiers: placement, streams, paced messages, failover and statistics."""
