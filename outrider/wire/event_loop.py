"""Run an event loop that takes the wake-ups of grpc.aio together."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Any

_MOST_WAKE_UPS = 1 << 16


class GrpcEventLoop(asyncio.SelectorEventLoop):
    """Runs the handler of grpc.aio's events once for all that have come.

    For each event its thread writes a byte to a socket of the loop. Its handler reads one of these bytes and then takes
    all events, so that the other bytes have it called again for nothing: once for each of thousands of messages a
    second. With another version of grpcio, whose handler is not known, this is the usual loop.
    """

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:  # type: ignore[override]
        handler = getattr(getattr(callback, "func", None), "__name__", "")
        if handler == "_handle_events" and isinstance(fd, socket.socket):
            super().add_reader(fd, _take_together, fd, callback, *args)
        else:
            super().add_reader(fd, callback, *args)


def _take_together(wake_ups: socket.socket, handle: Callable[..., Any], *args: Any) -> None:
    """Leave one byte of those that have come to the handler. Each is written after its event is in the queue."""
    if (count := len(wake_ups.recv(_MOST_WAKE_UPS, socket.MSG_PEEK))) > 1:
        wake_ups.recv(count - 1)
    handle(*args)
