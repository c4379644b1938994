"""What we claim, measured. `python -m benchmarks.NAME [--quick]`; the last line of output is one JSON object."""
