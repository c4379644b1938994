"""Short programs that use the SDK; each asks the cluster that OUTRIDER_EDGE_COORDINATOR (or _VERIFIER) names."""
