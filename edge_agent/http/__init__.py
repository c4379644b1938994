"""The device as an OpenAI-compatible HTTP server: `serve` runs it, `app` has its routes, `access` checks requests."""
