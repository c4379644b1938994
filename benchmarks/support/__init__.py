"""Parts that several benchmarks, and tests that need the same circumstances, plug into the product from outside."""
