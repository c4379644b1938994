"""The whole of distillation, shown on the running system: see `__main__`."""
