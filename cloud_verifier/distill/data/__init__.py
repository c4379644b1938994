"""Training data for drafts, chosen from the traffic log."""
