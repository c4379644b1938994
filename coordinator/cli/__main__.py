"""Run `outrider` as `python -m coordinator.cli`."""

from outrider.console_scripts import operator

if __name__ == "__main__":
    operator()
