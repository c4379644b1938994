"""Choose training data for drafts from the traffic log, and decide when there is reason to train."""
