"""Network emulation for tests, the demo and benchmarks."""
