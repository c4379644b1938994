"""Make a process observable: logs, metrics for Prometheus, and traces."""
