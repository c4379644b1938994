"""The coordinator's state in Redis: keys, scripts and codecs."""
