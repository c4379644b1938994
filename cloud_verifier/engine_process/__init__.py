"""Run the engine in a process of its own, and connect the front to it."""

EXIT_WITHOUT_PACKAGES = 78
"""Exit status of an engine process whose interpreter lacks what it needs to tell the front why it ends."""
