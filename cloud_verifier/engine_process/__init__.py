"""The engine's own process, and the front's connection to it."""
