"""Serve OpenAI's Responses API: items in, items and events out, and answers that are kept for the next turn."""
