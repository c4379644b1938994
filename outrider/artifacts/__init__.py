"""Files named by their content: atomic writes, stores and resumable downloads."""
