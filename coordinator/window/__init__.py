"""The speculation window: how far each session runs ahead, from what its verifier measured of it."""
