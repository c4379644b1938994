"""Control plane: places sessions on verifiers and signs the tickets that prove it. Never on the token path.

`service` translates, `handlers` decides, `store` keeps (and alone imports redis), `placement` holds the pure
decisions, `server` puts them together, `app` starts the process. Processes hold no state of their own: any number of
them share one Redis.
"""
