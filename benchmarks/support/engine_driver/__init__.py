"""Drive the verification engine step by step, without a network, and time the parts of a step."""
