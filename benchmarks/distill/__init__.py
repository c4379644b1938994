"""Run the whole distillation loop on the running system; `__main__` describes the run."""
