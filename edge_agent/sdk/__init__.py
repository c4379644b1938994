"""Turn prompts into the target's text from Python."""
