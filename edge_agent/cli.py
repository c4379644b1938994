"""`outrider-edge`: the entry point, which Ctrl-C ends quietly from its first import on."""

from __future__ import annotations

from collections.abc import Sequence

EXIT_INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> None:
    """Run a command line. Raises SystemExit where it fails."""
    try:
        from edge_agent.commands import run  # here, since the imports are most of the first second

        run(arguments)
    except KeyboardInterrupt:
        raise SystemExit(EXIT_INTERRUPTED) from None


if __name__ == "__main__":
    main()
