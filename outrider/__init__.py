"""Outrider: speculative decoding across the network."""

__version__ = "0.1.0"
