"""`outrider top`: the cluster as it is now, in the terminal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

from coordinator.cli import json_views
from coordinator.cli.connection import Ask, line, link_of, link_options
from coordinator.cli.output import WATCH_S
from coordinator.cli.rates import Rates
from coordinator.cli.values import at_most, seconds
from outrider.core.errors import BadRequest, Overloaded, Unavailable
from outrider.wire.v1 import coordinator_pb2 as pb

ONCE_SESSIONS = 20
_QUIT = (b"q", b"Q", b"\x03", b"\x04", b"\x1b", b"")
"""Ctrl-C, Ctrl-D, Escape and the end of input among them."""


def add_parser(commands: Any) -> None:
    top = commands.add_parser(
        "top",
        help="a live view: verifiers, load, price, acceptance, round trips, tokens/s",
        epilog="q or Ctrl-C ends it. Acceptance and tokens/s are of the time since the frame before; in the first,"
        " and with --once, acceptance is of the live sessions' whole life and sessions have no tokens/s.",
    )
    top.add_argument(
        "-d",
        "--interval",
        type=seconds,
        default=WATCH_S,
        metavar="SECONDS",
        help=f"between two frames [default: {WATCH_S:g}]",
    )
    top.add_argument("--once", action="store_true", help="print one frame and end")
    top.add_argument(
        "--sessions",
        type=at_most(1_000),
        metavar="N",
        help=f"show so many, the busiest first [default: what the terminal has room for; {ONCE_SESSIONS} with --once]",
    )
    link_options(top)
    top.set_defaults(run=_top)


def _top(options: argparse.Namespace) -> int:
    """The exit code. Raises core errors, and ImportError without rich."""
    from coordinator.cli.top_view import Screen  # needs rich, which nothing else does

    if not (options.once or sys.stdout.isatty()):
        raise BadRequest("top needs a terminal to draw in; --once prints one frame, `outrider status --watch` goes on")
    screen = Screen()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_once(options, screen) if options.once else _live(options, screen))
    return 0


async def _once(options: argparse.Namespace, screen: Any) -> None:
    async with line(options) as ask:
        known = await _look(options, ask)
    screen.print(known, Rates(), options.sessions or ONCE_SESSIONS)


async def _live(options: argparse.Namespace, screen: Any) -> None:
    rates, trouble = Rates(), ""
    async with line(options) as ask:
        known = await _look(options, ask)  # what is wrong from the start is told in a line, as everywhere
        rates.see(known, time.monotonic())
        with screen.live(), _keys() as pressed:
            while True:
                screen.show(known, rates, options.sessions, options.interval, trouble)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(pressed.wait(), options.interval)
                    return
                try:
                    known, trouble = await _look(options, ask), ""
                    rates.see(known, time.monotonic())
                except (Unavailable, Overloaded) as error:
                    trouble = str(error)


async def _look(options: argparse.Namespace, ask: Ask) -> json_views.Document:
    return json_views.status(link_of(options).coordinator, await ask("Status", pb.StatusRequest()))


@contextlib.contextmanager
def _keys() -> Iterator[asyncio.Event]:
    """Set at SIGTERM, or when a key is pressed that ends it; a terminal gives keys at once, and shows none."""
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
