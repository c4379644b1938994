"""Place sessions on verifiers, decide how far they speculate, and sign the tickets that prove both; off the token path.

`api` translates calls and answers them, `store` keeps the state in Redis (and alone imports redis), `placement` and
`window` hold the pure decisions, `releases` the draft releases, `cli` the operators' commands. Processes hold no
state of their own: any number of them share one Redis.
"""

START_TIMEOUT_S = 180.0
"""Seconds that a process may take to start: enough for the models of the demo; a large one loads for minutes."""
