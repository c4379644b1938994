"""Carry a device's connection to a verifier, and read what an observer on the way could: frames, and in plain text what
they hold, to compare the two."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

from google.protobuf.message import DecodeError, Message

from outrider.core.addresses import split_address
from outrider.wire.v1 import session_pb2 as pb

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _PADDED = 0x0, 0x8
_HEAD = 9
"""Bytes of the head of a frame of HTTP/2."""
_PREFIX = 5
"""Bytes before a message of gRPC."""


@dataclass(frozen=True)
class Seen:
    """Hold a message, and the bytes of its frame that an observer sees."""

    at: float
    size: int
    message: Message


@dataclass
class _Direction:
    """Take apart one direction of a connection."""

    kind: type[Message]
    seen: list[Seen]
    skipped: int = 0
    """Bytes of the preface that are still to come."""
    _frames: bytearray = field(default_factory=bytearray)
    _messages: dict[int, bytearray] = field(default_factory=dict)

    def take(self, data: bytes) -> None:
        skipped = min(self.skipped, len(data))
        self.skipped -= skipped
        self._frames += data[skipped:]
        while len(self._frames) >= _HEAD:
            end = _HEAD + int.from_bytes(self._frames[:3])
            if len(self._frames) < end:
                return
            kind, flags, stream = self._frames[3], self._frames[4], int.from_bytes(self._frames[5:_HEAD])
            body = bytes(self._frames[_HEAD:end])
            del self._frames[:end]
            if kind == _DATA:
                self._take_data(stream, body[1 : len(body) - body[0]] if flags & _PADDED else body, len(body))

    def _take_data(self, stream: int, data: bytes, size: int) -> None:
        """Read the messages in a frame. Of a message in several frames the last one's size counts with the others."""
        waiting = self._messages.setdefault(stream, bytearray())
        before = len(waiting)
        waiting += data
        first = True
        while len(waiting) >= _PREFIX and len(waiting) >= (end := _PREFIX + int.from_bytes(waiting[1:_PREFIX])):
            with contextlib.suppress(DecodeError):  # another method's message
                message = self.kind.FromString(bytes(waiting[_PREFIX:end]))
                self.seen.append(Seen(time.monotonic(), size + before if first and before else end, message))
            del waiting[:end]
            first = False


class Wiretap:
    """Listen on a loopback port and carry bytes to `target`, as an async context manager."""

    def __init__(self, target: str) -> None:
        self._target = split_address(target)
        self.address = ""
        self.up: list[Seen] = []
        """ClientMessages."""
        self.down: list[Seen] = []
        """ServerMessages."""
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def session_ids(self) -> set[str]:
        """Return the ids of sessions that devices have opened here."""
        opens = (seen.message for seen in self.up if isinstance(seen.message, pb.ClientMessage))
        return {message.open.session_id for message in opens if message.WhichOneof("kind") == "open"}

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        up = _Direction(pb.ClientMessage, self.up, skipped=len(_PREFACE))
        down = _Direction(pb.ServerMessage, self.down)
        for source, sink, direction in ((reader, far_writer, up), (far_reader, writer, down)):
            task = asyncio.create_task(_carry(source, sink, direction))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: _Direction) -> None:
    with contextlib.closing(writer), contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            direction.take(data)
            writer.write(data)
            await writer.drain()
