"""Implement the session protocol once and without I/O: how device and verifier answer one another's messages.

docs/protocol.md states the numbered rules that the comments cite. `device` and `verifier` are the two state machines;
`messages` holds what travels between them.
"""
