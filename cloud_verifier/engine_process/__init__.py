"""Run the engine in a process of its own, and connect the front to it."""
