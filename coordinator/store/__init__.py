"""Keep the coordinator's state in Redis, with keys, scripts and codecs."""
