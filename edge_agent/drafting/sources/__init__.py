"""Draft sources: `base` defines the interface, each other module implements one way to propose tokens."""
