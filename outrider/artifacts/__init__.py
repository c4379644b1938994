"""Keep files by the hash of their content: write them atomically, hash them, store them, resume their downloads."""
