"""The client SDK: turn prompts into the target's text from Python."""
