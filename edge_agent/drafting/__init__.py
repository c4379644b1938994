"""Drafting on the device: token trees are grown ahead of the verifier."""
