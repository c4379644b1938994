"""Release trained drafts: the gate's decision, signatures, and the coordinator's records."""
