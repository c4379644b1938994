"""Attack a live cluster, while a neighbour's session goes on, and say what holds."""
