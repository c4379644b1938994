"""The session protocol, written once and without I/O: what a device and a verifier do with one another's messages.

docs/protocol.md states the numbered rules that the comments cite. `device` and `verifier` are the two state machines;
`messages` is what travels between them.
"""
