"""Training of a draft on the target's recorded distributions."""
