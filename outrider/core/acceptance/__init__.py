"""Acceptance statistics: estimates for device and verifier, and the history that predictions replay."""
