"""Verify draft trees of many sessions with one target: synchronous, without I/O; plain data in, plain data out.

`engine` runs steps; `scheduler` and `row_allocation` decide on their rows; `session` and `nodes` are one session;
`server_draft` has the verifier's own drafts; `torch_backend` and `vllm_backend` compute a step's rows.
"""
