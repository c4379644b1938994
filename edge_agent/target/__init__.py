"""Fetch, cache and load what a device needs of a target: tokenizer, chat template and draft."""
