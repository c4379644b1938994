"""Define the contract on the wire: stubs generated from proto/, codecs, channels, status mapping."""
