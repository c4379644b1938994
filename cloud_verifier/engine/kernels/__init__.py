"""Attention backends, linear layers and CUDA graphs of the engine."""
