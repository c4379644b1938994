"""Measure what Outrider claims: `python -m benchmarks.NAME [--quick | --smoke]`; the last line is one JSON object."""
