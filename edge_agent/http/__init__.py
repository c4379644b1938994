"""Serve OpenAI's HTTP interface from a device: `serve` runs it, `app` has its routes, `access` checks requests."""
