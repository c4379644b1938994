"""Show the cluster live in the terminal, with rich, until a key is pressed (`outrider top`)."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from collections import deque
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
BAR = 10
HISTORY = 24
"""Frames whose tokens per second are remembered."""
_SPARKS = " ▁▂▃▄▅▆▇█"
_OTHER_LINES = 9
"""Lines of a frame that are neither verifiers nor sessions."""
_STATES = {"serving": "green", "cordoned": "yellow", "draining": "magenta"}

_Counts = Mapping[tuple[str, int], tuple[int, int]]
"""Id and epoch -> two counts."""
_QUIT = (b"q", b"Q", b"\x03", b"\x04", b"\x1b", b"")
"""Keys that end it, Ctrl-C, Ctrl-D, Escape and the end of input among them."""


def top(options: argparse.Namespace) -> int:
    """Show frames and return the exit code. Raises core errors."""
    if not (options.once or sys.stdout.isatty()):
        raise BadRequest("top needs a terminal to draw in; --once prints one frame, `outrider status --watch` goes on")
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PLAIN_WIDTH
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_once(options, console) if options.once else _live(options, console))
    return 0


async def _once(options: argparse.Namespace, console: Console) -> None:
    async with connect(options, TIMEOUT_S) as call:
        known = await _status(options, call)
    sessions = options.sessions or TOP_SESSIONS
    console.print(frame(known, Rates(), len(known["verifiers"]), sessions, console.width))


async def _live(options: argparse.Namespace, console: Console) -> None:
    rates, foot = Rates(), Text(f"every {options.interval:g} s; q quits", "dim")
    async with connect(options, TIMEOUT_S) as call:
        known = await _status(options, call)  # what is wrong from the start is printed in a line, as everywhere
        rates.add(known, time.monotonic())
        with Live(console=console, screen=True, auto_refresh=False, transient=True) as live, _keys() as pressed:
            trouble = ""  # why the frame is an old one
            while True:
                below = Text(clean(trouble), "bold red") if trouble else foot
                live.update(Group(_fitted(known, rates, options.sessions, console), below), refresh=True)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(pressed.wait(), options.interval)
                    return
                try:
                    known, trouble = await _status(options, call), ""
                    rates.add(known, time.monotonic())
                except (Unavailable, Overloaded) as error:
                    trouble = str(error)


async def _status(options: argparse.Namespace, call: AdminCall) -> json_views.Document:
    return json_views.status(admin_settings(options).coordinator, await call("Status", pb.StatusRequest()))


@contextlib.contextmanager
def _keys() -> Iterator[asyncio.Event]:
    """Yield an event that is set at SIGTERM or by a key that quits; the terminal passes keys on at once, unseen."""
    pressed, loop = asyncio.Event(), asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, pressed.set)  # or the terminal would stay as it is
    if not sys.stdin.isatty():
        yield pressed
        return
    import termios  # not on every system, nor is a terminal there
    import tty

    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def read() -> None:
        if os.read(fd, 64) in _QUIT:  # an arrow key begins with ESC, too, and is longer
            pressed.set()

    tty.setcbreak(fd)
    loop.add_reader(fd, read)
    try:
        yield pressed
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


class Rates:
    """Computes rates from two frames' counters, which only grow while a session lives."""

    def __init__(self) -> None:
        self._at = 0.0
        self._verifiers: _Counts = {}
        self._sessions: _Counts = {}
        self._acceptance: dict[str, float] = {}
        self._tokens_per_s: dict[str, float] = {}
        self.history: dict[str, deque[float]] = {}
        """Tokens per second of each verifier, the newest last."""

    def add(self, status: Document, now: float) -> None:
        """Take the counters of a document of `status`. now: seconds on a clock that does not jump."""
        verifiers = {(v["id"], 0): (v["evaluated"], v["accepted"]) for v in status["verifiers"]}
        sessions = {(s["id"], s["epoch"]): (s["committed"], 0) for s in status["sessions"]}
        if self._at and now > self._at:
            grown = _growth(self._verifiers, verifiers)
            self._acceptance |= {name: new[1] / new[0] for name, new in grown if 0 <= new[1] <= new[0] and new[0]}
            grown = _growth(self._sessions, sessions)
            self._tokens_per_s = {name: new[0] / (now - self._at) for name, new in grown if new[0] >= 0}
        known = {v["id"]: v["tokens_per_s"] for v in status["verifiers"]}
        self._acceptance = {name: share for name, share in self._acceptance.items() if name in known}
        self.history = {name: self.history.get(name, deque(maxlen=HISTORY)) for name in known}
        for name, tokens_per_s in known.items():
            self.history[name].append(tokens_per_s)
        self._at, self._verifiers, self._sessions = now, verifiers, sessions

    def acceptance(self, verifier: Document) -> float | None:
        """Return the accepted share of the nodes since the last frame that had any, or since its sessions began."""
        share: float | None = self._acceptance.get(verifier["id"], verifier["acceptance"])
        return share

    def tokens_per_s(self, session: str) -> float | None:
        """Return a session's speed; None if the frame before had no such session, or it has moved since."""
        return self._tokens_per_s.get(session)


def _fitted(status: Document, rates: Rates, sessions: int | None, console: Console) -> RenderableType:
    """Return a frame that fits the terminal, with this many sessions at most."""
    room = max(2, console.height - _OTHER_LINES)
    verifiers = min(len(status["verifiers"]), max(1, room // 2) if status["sessions"] else room)
    rest = max(1, room - verifiers)
    return frame(status, rates, verifiers, min(rest, sessions or rest), console.width)


def frame(status: Document, rates: Rates, verifiers: int, sessions: int, width: int) -> RenderableType:
    """Return at most this many verifiers and sessions, the busiest first, with the number of those left out."""
    busiest = sorted(
        status["sessions"], key=lambda s: (-(rates.tokens_per_s(s["id"]) or 0.0), -s["committed"], s["id"])
    )
    return Group(
        _head(status),
        Text(),
        table(_verifier_columns(rates), status["verifiers"][:verifiers], width),
        _left_out("verifiers", verifiers, status["total_verifiers"]),
        table(_session_columns(rates), busiest[:sessions], width),
        _left_out("sessions", sessions, status["total_sessions"]),
    )


def bar(used: float, whole: float) -> Text:
    """Return a bar that is yellow from 70% and red from 90% on, and empty only if nothing is used."""
    part = _part(used, whole)
    full = max(round(part * BAR), int(part > 0))
    colour = "red" if part >= 0.9 else "yellow" if part >= 0.7 else "green"
    return Text.assemble(("█" * full, colour), ("░" * (BAR - full), "dim"))


def _verifier_columns(rates: Rates) -> Sequence[Column]:
    return (
        Column("VERIFIER", lambda v: v["id"]),
        Column("STATE", lambda v: Text(v["state"], _STATES[v["state"]])),
        Column("LOAD", lambda v: bar(v["sessions"], v["capacity"]), spare=3),
        number("SESSIONS", lambda v: f"{v['sessions']}/{v['capacity']}"),
        number("TOKENS/S", lambda v: f"{v['tokens_per_s']:.0f}"),
        Column("LATELY", lambda v: Text(_spark(rates.history.get(v["id"], ())), "cyan"), spare=4),
        number("STEP", lambda v: ms(v["step_ms"]), spare=2),
        number("MIN ACC", lambda v: f"{v['min_acceptance']:.2f}"),
        number("ACCEPTED", lambda v: share(rates.acceptance(v))),
        number("RTT", lambda v: ms(v["rtt_ms"])),
        Column("KV", _kv, spare=1),
    )


def _session_columns(rates: Rates) -> Sequence[Column]:
    return (
        Column("SESSION", lambda s: s["id"]),
        Column("TENANT", lambda s: s["tenant"], spare=2),
        Column("VERIFIER", lambda s: s["verifier"], spare=1),
        number("TOKENS/S", lambda s: "-" if (speed := rates.tokens_per_s(s["id"])) is None else f"{speed:.0f}"),
        number("COMMITTED", lambda s: str(s["committed"]), spare=4),
        number("TOKENS/STEP", lambda s: f"{s['tokens_per_step'] or 0:.2f}", spare=3),
        number("ACCEPTED", lambda s: share(s["acceptance"])),
        number("RTT", lambda s: ms(s["rtt_ms"])),
        Column("CLASS", lambda s: s["traffic_class"] or "-", spare=5),
    )


def _head(status: Document) -> Text:
    verifiers = status["verifiers"]
    states = [v["state"] for v in verifiers]
    counted = ", ".join(f"{states.count(state)} {state}" for state in _STATES if state in states) or "none"
    evaluated, accepted = (sum(v[name] for v in verifiers) for name in ("evaluated", "accepted"))
    return Text.assemble(
        ("outrider top", "bold"),
        f"  {clean(status['coordinator'])}  {time.strftime('%H:%M:%S')}  up {_duration(status['uptime_s'])}",
        f"  store {clean(status['store'])}\n",
        ("verifiers ", "dim"),
        counted,
        ("   sessions ", "dim"),
        f"{sum(v['sessions'] for v in verifiers)} of {sum(v['capacity'] for v in verifiers)}",
        ("   tokens/s ", "dim"),
        f"{sum(v['tokens_per_s'] for v in verifiers):.0f}",
        ("   accepted ", "dim"),
        share(accepted / evaluated if evaluated else None),
        no_wrap=True,
        overflow="ellipsis",
    )


def _kv(verifier: Document) -> Text:
    used = verifier["kv_used"], verifier["kv_capacity"]
    return Text.assemble(bar(*used), f" {_part(*used):.0%}")


def _part(used: float, whole: float) -> float:
    return min(1.0, used / whole) if whole else 0.0


def _spark(values: Sequence[float]) -> str:
    """Return a graph of values from 0 to the greatest of them."""
    most = max(values, default=0.0)
    top = len(_SPARKS) - 1
    return "".join(_SPARKS[round(top * value / most) if most > 0 else 0] for value in values)


def _left_out(what: str, most: int, total: int) -> Text:
    return Text(f"and {total - most} more {what}" if total > most else "", "dim")


def _duration(up_s: float) -> str:
    minutes, hours = int(up_s) // 60, int(up_s) // 3600
    return f"{int(up_s)} s" if minutes < 2 else f"{minutes} min" if hours < 2 else f"{hours} h {minutes % 60} min"


def _growth(before: _Counts, after: _Counts) -> Iterator[tuple[str, tuple[int, int]]]:
    """Yield the ids that are in both frames, in the same epoch, with what was added to their counts.

    Sessions that end take their counts with them, so counts of a verifier that shrink tell nothing.
    """
    for key, new in after.items():
        if old := before.get(key):
            yield key[0], (new[0] - old[0], new[1] - old[1])
