"""Serve files over HTTP; truncate, stall, ignore ranges, alter bytes or send too many if asked to."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from dataclasses import dataclass, field


@dataclass
class Behaviour:
    """Set how the server answers; it may be changed while it runs."""

    break_after: int = 0
    """Close the connection after so many bytes of a body, once."""
    stall_after: int = -1
    """Send nothing more after so many bytes of a body."""
    ranges: bool = True
    flip: int = -1
    """Position of a byte that is altered."""
    extra: bytes = b""
    """Bytes sent after the file."""
    lengths: bool = True
    """False: send a body without Content-Length, which ends with the connection."""
    status: int = 0


@dataclass
class FileServer:
    """Serve `files`. Use it as an async context manager; `url` is where it listens."""

    files: dict[str, bytes] = field(default_factory=dict)
    """path without its slash -> content"""
    behaviour: Behaviour = field(default_factory=Behaviour)
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    """(path, headers in lower case) of every request"""
    url: str = ""
    tls: ssl.SSLContext | None = None
    _server: asyncio.Server | None = None
    _open: set[asyncio.StreamWriter] = field(default_factory=set)

    async def __aenter__(self) -> FileServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.tls)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.url = f"{'https' if self.tls else 'http'}://{host}:{port}/"
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            self._server.close()
        for writer in list(self._open):
            writer.close()

    @property
    def ranges(self) -> list[str]:
        """Return the range that was requested, "" for the whole."""
        return [headers.get("range", "") for _, headers in self.asked]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = head.split("\r\n")
                headers = {k.lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:] if line)}
                path = lines[0].split(" ")[1].lstrip("/")
                self.asked.append((path, headers))
                await self._answer(writer, path, headers)
        finally:
            self._open.discard(writer)
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, path: str, headers: dict[str, str]) -> None:
        how = self.behaviour
        if path not in self.files or how.status:
            status = how.status or 404
            writer.write(f"HTTP/1.1 {status} No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
            await writer.drain()
            return
        data = bytearray(self.files[path])
        if how.flip >= 0:
            data[how.flip] ^= 1
        data += how.extra
        start, status = 0, "200 OK"
        lines = ["Connection: close"]
        if how.ranges and "range" in headers:
            start = int(headers["range"].removeprefix("bytes=").removesuffix("-"))
            if start >= len(data):
                writer.write(b"HTTP/1.1 416 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                await writer.drain()
                return
            status = "206 Partial Content"
            lines.append(f"Content-Range: bytes {start}-{len(data) - 1}/{len(data)}")
        body = bytes(data[start:])
        lines += [f"Content-Length: {len(body)}"] if how.lengths else []
        writer.write(("\r\n".join([f"HTTP/1.1 {status}", *lines]) + "\r\n\r\n").encode())
        await self._body(writer, body)

    async def _body(self, writer: asyncio.StreamWriter, body: bytes) -> None:
        how = self.behaviour
        if how.break_after:
            writer.write(body[: how.break_after])
            how.break_after = 0
            await writer.drain()
            return
        if how.stall_after >= 0:
            writer.write(body[: how.stall_after])
            await writer.drain()
            await asyncio.sleep(3600)
        writer.write(body)
        await writer.drain()
