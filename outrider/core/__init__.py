"""Hold what all parts of Outrider share, without I/O, on numpy and the standard library alone.

`tree` is the shared token tree, `coupling` the noise that couples draft and target, `processors` applies sampling
parameters to logits, `protocol` holds the session's two state machines, `errors` the one tree of errors.
"""
