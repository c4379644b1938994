"""Speak HTTP/2 below what a client of gRPC can do: calls whose messages never end."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.core.addresses import split_address

_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _WINDOW = 0x0, 0x1, 0x3, 0x4, 0x6, 0x8
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_END_HEADERS, _ACK = 0x4, 0x1
_FIRST_WINDOW = 65_535
_MOST_DATA = 16_384
"""Bytes of a frame that every peer accepts."""


@dataclass
class UnfinishedMessages:
    """Hold one connection of HTTP/2 on which every call sends a message of gRPC but for its last byte.

    It sends as much as the server's flow control allows. headers: further ones of each call.
    """

    address: str
    headers: Sequence[tuple[bytes, bytes]] = ()
    source: str = ""
    """The address to connect from; empty for the system's choice."""
    again: bool = False
    """Begin another call for each that the server ends."""
    sent: int = 0
    """Bytes of messages."""
    ended: int = 0
    """Calls that the server has ended."""
    _stream: int = 1
    """Id of the next call."""
    _window: int = _FIRST_WINDOW
    _first: int = _FIRST_WINDOW
    """What a new stream may send."""
    _left: dict[int, int] = field(default_factory=dict)
    """Stream -> bytes that it has not sent."""
    _windows: dict[int, int] = field(default_factory=dict)
    _writer: Any = None

    async def send(self, path: str, calls: int, message_bytes: int, seconds: float) -> None:
        """Begin the calls, and send for so long. The connection stays open; `close` ends it."""
        source = (self.source, 0) if self.source else None
        reader, self._writer = await asyncio.open_connection(*split_address(self.address), local_addr=source)
        self._writer.write(_PREFACE + _frame(_SETTINGS, 0, 0, b""))
        reading = asyncio.create_task(self._read(reader))
        try:
            await asyncio.sleep(0.2)  # the server's settings
            self._begin(path, calls, message_bytes)
            until = time.monotonic() + seconds
            while time.monotonic() < until and not reading.done():
                if self.again:
                    self._begin(path, calls - len(self._left), message_bytes)
                self._send_what_fits()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._writer.drain(), 0.5)
                await asyncio.sleep(0.01)
        except OSError:  # the server has closed the connection
            pass
        finally:
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)

    def _begin(self, path: str, calls: int, message_bytes: int) -> None:
        for _ in range(calls):
            stream, self._stream = self._stream, self._stream + 2
            self._writer.write(_frame(_HEADERS, _END_HEADERS, stream, self._fields(path)))
            self._left[stream], self._windows[stream] = message_bytes + 4, self._first
            self._data(stream, b"\0" + struct.pack(">I", message_bytes))

    def close(self) -> None:
        """Close the connection."""
        if self._writer is not None:
            self._writer.transport.abort()

    def _fields(self, path: str) -> bytes:
        """Return the call's header block, of literal fields without an index (RFC 7541, 6.2.2)."""
        fields = [
            (b":method", b"POST"),
            (b":scheme", b"http"),
            (b":path", path.encode()),
            (b":authority", self.address.encode()),
            (b"content-type", b"application/grpc"),
            (b"te", b"trailers"),
            *self.headers,
        ]
        return b"".join(b"\0" + _text(name) + _text(value) for name, value in fields)

    def _send_what_fits(self) -> None:
        """Send of every call as much as both windows allow."""
        for stream, left in list(self._left.items()):
            size = min(left, self._windows[stream], self._window, _MOST_DATA)
            if size > 0:
                self._left[stream] -= size
                self._data(stream, bytes(size))

    def _data(self, stream: int, data: bytes) -> None:
        self._writer.write(_frame(_DATA, 0, stream, data))
        self._windows[stream] -= len(data)
        self._window -= len(data)
        self.sent += len(data)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Follow the server's windows, and answer its settings and pings, until it ends the connection."""
        with contextlib.suppress(asyncio.IncompleteReadError, OSError):
            while True:
                head = await reader.readexactly(9)
                size, kind, flags = int.from_bytes(head[:3]), head[3], head[4]
                stream, body = int.from_bytes(head[5:]) & 0x7FFF_FFFF, await reader.readexactly(size)
                self._take(kind, flags, stream, body)

    def _take(self, kind: int, flags: int, stream: int, body: bytes) -> None:
        if kind == _SETTINGS and not flags & _ACK:
            for at in range(0, len(body), 6):
                name, value = struct.unpack(">HI", body[at : at + 6])
                if name == 0x4:  # the first window of a stream
                    self._first = value
            self._writer.write(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            self._writer.write(_frame(_PING, _ACK, 0, body))
        elif kind == _WINDOW:
            more = int.from_bytes(body) & 0x7FFF_FFFF
            if stream == 0:
                self._window += more
            elif stream in self._windows:
                self._windows[stream] += more
        elif kind == _RESET or (kind == _HEADERS and flags & 0x1):
            self.ended += self._left.pop(stream, None) is not None


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return len(body).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + body


def _text(value: bytes) -> bytes:
    """Return a string of HPACK, not compressed. Only strings of less than 127 bytes fit its one byte of length."""
    return bytes([len(value)]) + value
