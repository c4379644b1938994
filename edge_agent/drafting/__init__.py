"""Draft token trees ahead of the verifier, on threads beside the sessions' event loop."""
