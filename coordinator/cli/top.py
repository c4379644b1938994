"""Show the cluster live in the terminal, the busiest sessions first, until Ctrl-C (`outrider top`)."""

from __future__ import annotations

import argparse
import shutil
import sys
import time

from coordinator.cli import sessions
from coordinator.cli.arguments import TIMEOUT_S
from coordinator.cli.connection import AdminCall
from coordinator.cli.output import Columns, Result, show
from coordinator.cli.verifiers import overview, status

SESSIONS = 20
"""Sessions that are shown where there is no terminal to fill."""
_OTHER_LINES = 7
"""Lines of a frame that are neither verifiers nor sessions."""
COLUMNS: Columns = {
    "TOKENS/S": lambda s: "-" if s["tokens_per_s"] is None else f"{s['tokens_per_s']:.0f}",
    **sessions.COLUMNS,
}


class Frames:
    """Makes frames, with each session's speed since the frame before."""

    def __init__(self) -> None:
        self._at = 0.0
        self._committed: dict[tuple[str, int], int] = {}
        """Session and epoch, which is another after a session has moved -> tokens."""

    async def next(self, options: argparse.Namespace, call: AdminCall) -> Result:
        found = (await status(options, call)).document
        elapsed_s, known = time.monotonic() - self._at, dict[tuple[str, int], int]()
        for s in found["sessions"]:
            key = s["id"], s["epoch"]
            known[key] = s["committed"]
            s["tokens_per_s"] = (known[key] - self._committed[key]) / elapsed_s if key in self._committed else None
        self._at, self._committed = self._at + elapsed_s, known
        busiest = sorted(found["sessions"], key=lambda s: (-(s["tokens_per_s"] or 0.0), -s["committed"]))
        terminal = shutil.get_terminal_size() if sys.stdout.isatty() else None
        room = max(1, terminal.lines - len(found["verifiers"]) - _OTHER_LINES) if terminal else SESSIONS
        most = options.sessions or room
        view = overview({**found, "sessions": busiest[:most]}, COLUMNS)
        if found["total_sessions"] > most:
            view += f"\nand {found['total_sessions'] - most} more sessions"
        if terminal:
            view = "\n".join(line[: terminal.columns] for line in view.split("\n"))
        return Result(found, view)


def top(options: argparse.Namespace) -> int:
    """Show frames and return the exit code. Raises core errors."""
    options.watch = None if options.once else options.interval
    options.output, options.timeout_s = "table", TIMEOUT_S
    return show(Frames().next, options)
