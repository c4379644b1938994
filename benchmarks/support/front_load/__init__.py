"""Load a verifier's front as many devices and an engine would, at little CPU time of their own."""
