"""Tensor parallelism: one target over several ranks."""
