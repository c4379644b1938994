"""Show the cluster live in the terminal, with rich, until Ctrl-C (`outrider top`)."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence

try:
    from rich.console import Console, Group, RenderableType
    from rich.live import Live
    from rich.text import Text
except ImportError as error:
    raise ImportError("outrider top needs rich: pip install 'outrider[coordinator]'") from error

from coordinator.cli import json_views
from coordinator.cli.arguments import TIMEOUT_S, TOP_SESSIONS
from coordinator.cli.connection import AdminCall, admin_settings, connect
from coordinator.cli.json_views import Document
from coordinator.cli.output import Column, ms, number, share, table
from outrider.core.errors import BadRequest, Overloaded, Unavailable
from outrider.core.text import clean
from outrider.wire.v1 import coordinator_pb2 as pb

PLAIN_WIDTH = 132
"""Columns of a frame that goes to a file or a pipe."""
_OTHER_LINES = 8
"""Lines of a frame that are neither verifiers nor sessions."""
_Counts = Mapping[tuple[str, int], tuple[int, int]]
"""Id and epoch -> two counts."""


def top(options: argparse.Namespace) -> int:
    """Show frames and return the exit code. Raises core errors."""
    if not (options.once or sys.stdout.isatty()):
        raise BadRequest("top needs a terminal to draw in; --once prints one frame, `outrider status --watch` goes on")
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        asyncio.run(_run(options, console))
    return 0


async def _run(options: argparse.Namespace, console: Console) -> None:
    rates, note = Rates(), Text(f"every {options.interval:g} s; Ctrl-C ends", "dim")
    async with connect(options, TIMEOUT_S) as call:
        known = await _status(options, call)  # what is wrong from the start ends the command
        if options.once:
            console.print(frame(known, rates, len(known["verifiers"]), options.sessions or TOP_SESSIONS))
            return
        if task := asyncio.current_task():  # or the terminal would stay as it is
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                rates.add(known, time.monotonic())
                room = max(2, console.height - _OTHER_LINES)
                verifiers = min(len(known["verifiers"]), max(1, room // 2))
                sessions = min(room - verifiers, options.sessions or room)
                live.update(Group(frame(known, rates, verifiers, sessions), note), refresh=True)
                await asyncio.sleep(options.interval)
                try:
                    known, note.plain = await _status(options, call), f"every {options.interval:g} s; Ctrl-C ends"
                except (Unavailable, Overloaded) as error:  # the frame is an old one
                    note.plain = clean(str(error))


async def _status(options: argparse.Namespace, call: AdminCall) -> Document:
    return json_views.status(admin_settings(options).coordinator, await call("Status", pb.StatusRequest()))


class Rates:
    """Computes rates from two frames' counters, which only grow while a session lives."""

    def __init__(self) -> None:
        self._at = 0.0
        self._verifiers: _Counts = {}
        self._sessions: _Counts = {}
        self._acceptance: dict[str, float] = {}
        self._tokens_per_s: dict[str, float] = {}

    def add(self, status: Document, now: float) -> None:
        """Take the counters of a document of `status`. now: seconds on a clock that does not jump."""
        verifiers = {(v["id"], 0): (v["evaluated"], v["accepted"]) for v in status["verifiers"]}
        sessions = {(s["id"], s["epoch"]): (s["committed"], 0) for s in status["sessions"]}
        if self._at and now > self._at:
            grown = _growth(self._verifiers, verifiers)
            self._acceptance |= {name: new[1] / new[0] for name, new in grown if 0 <= new[1] <= new[0] and new[0]}
            grown = _growth(self._sessions, sessions)
            self._tokens_per_s = {name: new[0] / (now - self._at) for name, new in grown if new[0] >= 0}
        self._at, self._verifiers, self._sessions = now, verifiers, sessions

    def acceptance(self, verifier: Document) -> float | None:
        """Return the accepted share of the nodes since the last frame that had any, or since its sessions began."""
        share: float | None = self._acceptance.get(verifier["id"], verifier["acceptance"])
        return share

    def tokens_per_s(self, session: str) -> float | None:
        """Return a session's speed; None if the frame before had no such session, or it has moved since."""
        return self._tokens_per_s.get(session)


def frame(status: Document, rates: Rates, verifiers: int, sessions: int) -> RenderableType:
    """Return at most this many verifiers and sessions, the busiest first, with the number of those left out."""
    busiest = sorted(
        status["sessions"], key=lambda s: (-(rates.tokens_per_s(s["id"]) or 0.0), -s["committed"], s["id"])
    )
    head = (
        f"outrider top  {clean(status['coordinator'])}  up {status['uptime_s']:.0f} s  store {clean(status['store'])}"
    )
    return Group(
        Text(head, "bold", no_wrap=True, overflow="ellipsis"),
        Text(),
        table(_verifier_columns(rates), status["verifiers"][:verifiers]),
        _left_out("verifiers", verifiers, status["total_verifiers"]),
        table(_session_columns(rates), busiest[:sessions]),
        _left_out("sessions", sessions, status["total_sessions"]),
    )


def _verifier_columns(rates: Rates) -> Sequence[Column]:
    return (
        Column("VERIFIER", lambda v: v["id"]),
        Column("STATE", lambda v: v["state"]),
        number("SESSIONS", lambda v: f"{v['sessions']}/{v['capacity']}"),
        number("TOKENS/S", lambda v: f"{v['tokens_per_s']:.0f}"),
        number("ACCEPTED", lambda v: share(rates.acceptance(v))),
        number("MIN ACC", lambda v: f"{v['min_acceptance']:.2f}"),
        number("STEP", lambda v: ms(v["step_ms"])),
        number("RTT", lambda v: ms(v["rtt_ms"])),
        number("KV", lambda v: share(v["kv_used"] / v["kv_capacity"] if v["kv_capacity"] else None)),
    )


def _session_columns(rates: Rates) -> Sequence[Column]:
    return (
        Column("SESSION", lambda s: s["id"]),
        Column("TENANT", lambda s: s["tenant"]),
        Column("VERIFIER", lambda s: s["verifier"]),
        number("TOKENS/S", lambda s: "-" if (speed := rates.tokens_per_s(s["id"])) is None else f"{speed:.0f}"),
        number("COMMITTED", lambda s: str(s["committed"])),
        number("ACCEPTED", lambda s: share(s["acceptance"])),
        number("RTT", lambda s: ms(s["rtt_ms"])),
    )


def _left_out(what: str, most: int, total: int) -> Text:
    return Text(f"and {total - most} more {what}" if total > most else "", "dim")


def _growth(before: _Counts, after: _Counts) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the ids that are in both frames, in the same epoch, with what was added to their counts.

    Sessions that end take their counts with them, so counts of a verifier that shrink tell nothing.
    """
    for key, new in after.items():
        if old := before.get(key):
            yield key[0], (new[0] - old[0], new[1] - old[1])
