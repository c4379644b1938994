"""Exchange protobuf messages between front and engine process: length-prefixed frames over a socket pair."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
import threading
from collections.abc import AsyncIterator, Callable, Iterator

from google.protobuf.message import Message

from outrider.core import errors
from outrider.core.errors import InternalError, OutriderError
from outrider.wire.v1 import engine_pb2 as pb

_HEADER = struct.Struct("<I")
_RECEIVE_BYTES = 1 << 18


def frame(message: Message) -> bytes:
    """Return a serialised message with its length before it."""
    data = message.SerializeToString()
    return _HEADER.pack(len(data)) + data


async def read_events(reader: asyncio.StreamReader) -> AsyncIterator[pb.EngineEvent]:
    """Yield the engine's events until its process is gone: a step's, which come together, without waiting between."""
    buffer = bytearray()
    while data := await reader.read(_RECEIVE_BYTES):
        buffer += data
        for body in _bodies(buffer):
            yield pb.EngineEvent.FromString(body)


def _bodies(buffer: bytearray) -> Iterator[bytes]:
    """Take the whole frames out of a buffer, and yield what is in them."""
    taken, body = 0, _HEADER.size
    while len(buffer) >= body:
        (size,) = _HEADER.unpack_from(buffer, taken)
        if len(buffer) < body + size:
            break
        yield bytes(buffer[body : body + size])
        taken = body + size
        body = taken + _HEADER.size
    del buffer[:taken]


class EngineEnd:
    """Receives requests and sends events for the engine process's synchronous loop. Any thread may send."""

    def __init__(self, sock: socket.socket) -> None:
        """sock: to the verifier's process, with which the engine ends."""
        self.closed = False
        """Whether the verifier's process has gone."""
        self._sock = sock
        self._received = bytearray()
        self._unsent = b""
        """The rest of a frame that the socket took in part; it goes out before anything else."""
        self._sending = threading.RLock()

    def receive(self, timeout_s: Callable[[], float | None]) -> Iterator[pb.EngineRequest]:
        """Yield all requests that have come.

        If there are none, wait at most `timeout_s()` seconds (None: without a limit) for one.
        """
        waiting = [self._sock]
        if select.select(waiting, [], [], 0.0)[0] or select.select(waiting, [], [], timeout_s())[0]:
            data = self._sock.recv(_RECEIVE_BYTES)
            self.closed = not data
            self._received += data
        yield from map(pb.EngineRequest.FromString, _bodies(self._received))

    def send(self, events: list[pb.EngineEvent]) -> None:
        """Send events in one write. Raises ConnectionError if the front has gone."""
        if not events:
            return
        with self._sending:
            self._sock.sendall(b"".join([self._unsent, *map(frame, events)]))
            self._unsent = b""

    def offer(self, event: pb.EngineEvent) -> bool:
        """Send an event if that needs no waiting; return whether it was sent. Raises ConnectionError without a front.

        A socket that is writable has most of its buffer free (Linux: three quarters), so an offered event leaves room
        for commits.
        """
        with self._sending:
            if self._unsent or not select.select([], [self._sock], [], 0.0)[1]:
                return False
            data = frame(event)
            with contextlib.suppress(BlockingIOError):
                self._unsent = data[self._sock.send(data, socket.MSG_DONTWAIT) :]
                return True
        return False


def failure_event(error: OutriderError, session_id: str = "", epoch: int = 0) -> pb.EngineEvent:
    """Return the event that ends an epoch of a session with an error, or that says why the engine ends."""
    failure = pb.EngineFailure(
        kind=errors.known(error).__name__, message=str(error), field=error.field, retry_after_s=error.retry_after_s
    )
    return pb.EngineEvent(session_id=session_id, epoch=epoch, failure=failure)


def error_from_failure(failure: pb.EngineFailure) -> OutriderError:
    """Return the error that `failure_event` was given."""
    cls = errors.named(failure.kind) or InternalError
    return cls(failure.message, field=failure.field, retry_after_s=failure.retry_after_s)
