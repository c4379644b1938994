"""What a device needs of a target: tokenizer, chat template and draft, fetched and cached."""
