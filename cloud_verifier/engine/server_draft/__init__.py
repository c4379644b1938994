"""Propose nodes on the verifier, for every session, as long as that pays."""
