"""The heart of Outrider without I/O: numpy and the standard library only.

`tree` the shared token tree, `coupling` the noise that couples draft and target, `processors` sampling parameters
applied to logits, `protocol` the session's two state machines, `errors` the one tree of errors.
"""
