"""`outrider top`: show the cluster live in the terminal, until a key is pressed."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator

from coordinator.cli import json_views
from coordinator.cli.arguments import TOP_SESSIONS
from coordinator.cli.connection import AdminCall, connected, settings_of
from coordinator.cli.top_view import Rates, Screen
from outrider.core.errors import BadRequest, Overloaded, Unavailable
from outrider.wire.v1 import coordinator_pb2 as pb

_QUIT = (b"q", b"Q", b"\x03", b"\x04", b"\x1b", b"")
"""Keys that end it, Ctrl-C, Ctrl-D, Escape and the end of input among them."""


def top(options: argparse.Namespace) -> int:
    """Show frames and return the exit code. Raises core errors."""
    if not (options.once or sys.stdout.isatty()):
        raise BadRequest("top needs a terminal to draw in; --once prints one frame, `outrider status --watch` goes on")
    screen = Screen()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_once(options, screen) if options.once else _live(options, screen))
    return 0


async def _once(options: argparse.Namespace, screen: Screen) -> None:
    async with connected(options) as call:
        known = await _status(options, call)
    screen.print(known, Rates(), options.sessions or TOP_SESSIONS)


async def _live(options: argparse.Namespace, screen: Screen) -> None:
    rates, trouble = Rates(), ""
    async with connected(options) as call:
        known = await _status(options, call)  # what is wrong from the start is printed in a line, as everywhere
        rates.add(known, time.monotonic())
        with screen.live(), _keys() as pressed:
            while True:
                screen.show(known, rates, options.sessions, options.interval, trouble)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(pressed.wait(), options.interval)
                    return
                try:
                    known, trouble = await _status(options, call), ""
                    rates.add(known, time.monotonic())
                except (Unavailable, Overloaded) as error:
                    trouble = str(error)


async def _status(options: argparse.Namespace, call: AdminCall) -> json_views.Document:
    return json_views.status(settings_of(options).coordinator, await call("Status", pb.StatusRequest()))


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
