"""The device as an OpenAI-compatible HTTP server: `outrider-edge serve`.

`serve` runs it and `app` has its routes. `access` checks who asks and how much, `requests` reads bodies, `streaming`
runs their choices and sends events, `responses` and `errors` write answers in OpenAI's shapes, which `schema`
describes.
"""
