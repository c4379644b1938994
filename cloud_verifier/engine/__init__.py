"""Verify draft trees of many sessions with one target: synchronous, without I/O; plain data in, plain data out.

`engine` runs steps; `scheduler` and `row_allocation` decide on their rows; `session` and `session_slots` are one
session; `model` is the target, `kernels` its attention; `kv_pool` and `prefix_cache` hold keys and values.
"""
