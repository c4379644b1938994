"""Release of trained drafts: the gate, signatures and the coordinator's records."""
