"""Drafts as GGUF files: import, export, checks and evaluation."""
