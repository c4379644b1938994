"""Provide parts that several benchmarks, and some tests, plug into the product from outside."""
