"""Run a Hugging Face target by our own forward passes: packed token trees over a pool of KV slots."""
