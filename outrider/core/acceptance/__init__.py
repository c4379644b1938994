"""Estimate acceptance on device and verifier, and keep the history that predictions replay."""
