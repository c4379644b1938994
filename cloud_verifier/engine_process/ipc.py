"""Protobuf messages in length-prefixed frames over a socket pair: what front and engine process speak."""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
from collections.abc import Iterator
from typing import TypeVar

from google.protobuf.message import Message

from outrider.core import errors
from outrider.core.errors import InternalError, OutriderError
from outrider.wire.v1 import engine_pb2 as pb

M = TypeVar("M", bound=Message)

_HEADER = struct.Struct("<I")
_RECEIVE_BYTES = 1 << 18


def frame(message: Message) -> bytes:
    data = message.SerializeToString()
    return _HEADER.pack(len(data)) + data


async def read_event(reader: asyncio.StreamReader) -> pb.EngineEvent:
    """The next event. Raises asyncio.IncompleteReadError where the engine process is gone."""
    (size,) = _HEADER.unpack(await reader.readexactly(_HEADER.size))
    return pb.EngineEvent.FromString(await reader.readexactly(size))


class EngineEnd:
    """The engine's end, for its synchronous loop."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._buffer = bytearray()
        self._closed = False
        self._owed = b""
        """The rest of a frame that was taken up in part, before anything else."""

    @property
    def closed(self) -> bool:
        """Whether the front has gone."""
        return self._closed

    def receive(self, timeout_s: float | None) -> Iterator[pb.EngineRequest]:
        """Everything that has come, waiting for the first byte at most `timeout_s` (None: for ever)."""
        if select.select([self._sock], [], [], timeout_s)[0]:
            data = self._sock.recv(_RECEIVE_BYTES)
            self._closed = not data
            self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._buffer)
            end = _HEADER.size + size
            if len(self._buffer) < end:
                return
            body = bytes(self._buffer[_HEADER.size : end])
            del self._buffer[:end]
            yield pb.EngineRequest.FromString(body)

    def send(self, events: list[pb.EngineEvent]) -> None:
        if events:
            self._sock.sendall(b"".join([self._owed, *map(frame, events)]))
            self._owed = b""

    def offer(self, event: pb.EngineEvent) -> bool:
        """Send it if that can be done without waiting; whether it was. Raises ConnectionError where the front is gone.

        A socket that is writable has most of its buffer free (Linux: three quarters), so what is offered leaves the
        room that others need.
        """
        if self._owed or not select.select([], [self._sock], [], 0.0)[1]:
            return False
        data = frame(event)
        with contextlib.suppress(BlockingIOError):
            self._owed = data[self._sock.send(data, socket.MSG_DONTWAIT) :]
            return True
        return False


def failure_to_event(error: OutriderError) -> pb.EngineFailure:
    return pb.EngineFailure(
        kind=type(error).__name__,
        message=str(error),
        field=getattr(error, "field", ""),
        retry_after_s=getattr(error, "retry_after_s", 0.0),
    )


def failure_from_event(failure: pb.EngineFailure) -> OutriderError:
    cls = getattr(errors, failure.kind, InternalError)
    if not (isinstance(cls, type) and issubclass(cls, OutriderError)):
        return InternalError(failure.message)
    if issubclass(cls, errors.BadRequest):
        return cls(failure.message, field=failure.field)
    if issubclass(cls, errors.Overloaded | errors.Unavailable):
        return cls(failure.message, retry_after_s=failure.retry_after_s)
    return cls(failure.message)
