"""Drafting on the verifier, for sessions whose devices draft nothing."""
