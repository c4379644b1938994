"""The verifier's engine: synchronous, without I/O; plain data in, plain data out.

`engine` the step and the life of sessions, `scheduler` who steps now, `session` one session, `model` the target,
`selftest` its admission, `attention` the backends, `batch` a step's rows, `kv_pool` keys and values in slots,
`prefix_cache` which of them hold which tokens, `sampling` the target's token, `memory` what outlives a session,
`stats` what is measured.
"""
