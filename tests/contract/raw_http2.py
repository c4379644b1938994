"""Hold calls of gRPC whose first message never ends, which no client of gRPC can do, over one connection of HTTP/2."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time

DATA, HEADERS, RESET, SETTINGS, PING, GOAWAY, WINDOW = 0x0, 0x1, 0x3, 0x4, 0x6, 0x7, 0x8
FIRST_WINDOW, MOST_DATA = 65_535, 16_384
INITIAL_WINDOW = 0x4
"""The setting that says what a new stream may send."""


class UnfinishedMessages:
    """Begins calls and sends all but the last byte of each one's message, as the server's flow control allows."""

    def __init__(self, address: str, path: str, calls: int, size: int) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host, int(port)))
        self._received, self._to_send = b"", bytearray(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, b""))
        self._first, self._window = FIRST_WINDOW, FIRST_WINDOW
        self._left: dict[int, int] = {}
        self._windows: dict[int, int] = {}
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", address)]
        fields += [("content-type", "application/grpc"), ("te", "trailers")]
        block = b"".join(b"\0" + text(name) + text(value) for name, value in fields)  # RFC 7541, 6.2.2
        for stream in range(1, 2 * calls, 2):
            self._to_send += frame(HEADERS, 0x4, stream, block)
            self._left[stream], self._windows[stream] = size + 4, FIRST_WINDOW
            self._data(stream, b"\0" + struct.pack(">I", size))

    def run(self, seconds: float) -> None:
        """Send and receive for so long, or until the server closes the connection; it stays open."""
        end = time.monotonic() + seconds
        self._socket.setblocking(False)
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < end:
                self._fill()
                readable, writable, _ = select.select([self._socket], [self._socket] if self._to_send else [], [], 0.05)
                if writable:
                    del self._to_send[: self._socket.send(self._to_send[: 1 << 20])]
                if readable:
                    data = self._socket.recv(1 << 16)
                    if not data:
                        return
                    self._take(data)

    def close(self) -> None:
        self._socket.close()

    def _fill(self) -> None:
        for stream, left in self._left.items():
            size = min(left, self._windows[stream], self._window, MOST_DATA)
            if size > 0 and len(self._to_send) < 1 << 20:
                self._left[stream] -= size
                self._data(stream, bytes(size))

    def _data(self, stream: int, data: bytes) -> None:
        self._to_send += frame(DATA, 0, stream, data)
        self._windows[stream] -= len(data)
        self._window -= len(data)

    def _take(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= 9 + (size := int.from_bytes(self._received[:3])):
            kind, flags, stream = self._received[3], self._received[4], int.from_bytes(self._received[5:9])
            body, self._received = self._received[9 : 9 + size], self._received[9 + size :]
            if kind == WINDOW and stream in self._windows:
                self._windows[stream] += int.from_bytes(body)
            elif kind == WINDOW and stream == 0:
                self._window += int.from_bytes(body)
            elif kind == RESET:
                self._left.pop(stream, None)
            elif kind == PING and not flags:
                self._to_send += frame(PING, 1, 0, body)
            elif kind == SETTINGS and not flags:
                for name, value in struct.iter_unpack(">HI", body):
                    if name == INITIAL_WINDOW:
                        self._windows = {one: window + value - self._first for one, window in self._windows.items()}
                        self._first = value
                self._to_send += frame(SETTINGS, 1, 0, b"")


def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    """Return a frame of HTTP/2."""
    return len(body).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + body


def text(value: str) -> bytes:
    """Return a literal of a header block, at most 126 characters."""
    return bytes([len(value)]) + value.encode()
