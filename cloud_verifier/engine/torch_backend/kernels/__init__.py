"""Compute attention over KV slots and the linear layers: backends, tables, triton kernels, CUDA graphs."""
