"""Simulate a fleet of devices around the real window controller, and work out the best that it could decide."""
