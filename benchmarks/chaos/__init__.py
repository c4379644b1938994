"""Inject faults into a cluster under load, from a seeded schedule, and check every session's output."""
