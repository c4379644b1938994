"""Train a draft on the distributions that the target had at each position of recorded text."""
