"""Benchmark the coordinator's windows; see benchmarks.window.__main__."""
