"""Emulate wide-area networks, for tests, the demo and benchmarks."""
