"""Developer commands; never installed."""
