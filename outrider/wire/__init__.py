"""Define the contract on the wire: stubs generated from proto/, checks, channels, status mapping."""
