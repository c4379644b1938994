"""Manage draft releases: the draft that devices of a target use, and the evidence by which a new one replaces it."""
