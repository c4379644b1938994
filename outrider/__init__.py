"""Decode speculatively across a network: devices draft, verifiers check."""

__version__ = "0.1.0"
