"""Short programs that use the SDK, each on the cluster that OUTRIDER_EDGE_COORDINATOR (or _VERIFIER) names."""
