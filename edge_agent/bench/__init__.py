"""Measure a running cluster: users with drafts and without, side by side (`outrider bench`)."""
