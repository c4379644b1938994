"""Read, write, check and measure drafts as GGUF files, the form in which devices run them."""
