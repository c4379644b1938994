"""Decide the speculation window of each session from what its verifier measured."""
