"""Simulate a fleet of devices around the real window controller, and compute the best possible decisions."""
