"""`python -m coordinator.cli`."""

from coordinator.cli.command import main

if __name__ == "__main__":
    main()
