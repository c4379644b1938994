"""What a process tells those who run it: metrics for Prometheus, and logs."""
