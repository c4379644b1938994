"""Pass TCP connections through an emulated wide-area link, where the kernel emulates none.

The proxy handles byte streams, not packets, so loss appears as a stall. While nothing passes, it stops reading: the
sender writes until its socket's buffer is full and then waits, as on a path whose acknowledgements do not come back.
The kernel still accepts connections and acknowledges what fits its buffer, so only timeouts of the application expire,
never those of TCP.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
from collections.abc import Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from outrider.core.addresses import split_address

_QUEUED_CHUNKS = 1_024
_QUEUED_BYTES = 1 << 16
"""Bytes that may wait for a slow line in each direction, as in a router's buffer; then the sender must wait."""
_CHUNK_BYTES, _PACKET_BYTES = 1 << 14, 1_200
_CHUNK_S = 0.01
"""Time of a chunk on a slow line, which so flows evenly."""
_KERNEL_BYTES = 1 << 17
"""The kernel's buffers would grow to several MiB by themselves, which a sender would fill before it has to wait."""
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


@dataclass(frozen=True, slots=True)
class Link:
    """Describe a link, shared by its connections."""

    rtt_ms: float = 0.0
    """Round trip; each way takes half of it."""
    up_bps: float = math.inf
    """Bits per second from clients to the target."""
    down_bps: float = math.inf

    def bps(self, *, up: bool) -> float:
        """Return the bits per second of one direction."""
        return self.up_bps if up else self.down_bps


class DelayProxy:
    """Pass bytes from a loopback port to and from `target` as `link` says, in order, as an async context manager.

    `link` may be changed at any time: it holds for bytes that arrive from then on.
    """

    def __init__(self, target: str, rtt_ms: float = 0.0, *, link: Link | None = None) -> None:
        self.link = link or Link(rtt_ms)
        self.address = ""
        self._target = split_address(target)
        self._passing = asyncio.Event()
        self._passing.set()
        self._free_s = {True: -math.inf, False: -math.inf}
        """When the line up, and the one down, has sent all that arrived."""
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=_CHUNK_BYTES)
        self._server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _KERNEL_BYTES)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        ending = [*self._connections]
        for task in ending:
            task.cancel()
        await asyncio.gather(*ending, return_exceptions=True)

    def blackhole(self) -> None:
        """Let nothing pass in either direction, not even the end of a connection, until `lift`."""
        self._passing.clear()

    def lift(self) -> None:
        """Let everything pass again, as fast as the link allows."""
        self._passing.set()

    def reset_connections(self) -> None:
        """Reset every connection on both sides; what was on its way is lost. New ones are accepted."""
        for task, writers in self._connections.items():
            for writer in writers:
                with contextlib.suppress(OSError):  # closed a moment ago
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                writer.transport.abort()
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            return
        writers = self._connections[task] = [writer]
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.CancelledError):
            try:
                await self._passing.wait()
                far_reader, far_writer = await asyncio.open_connection(*self._target, limit=_CHUNK_BYTES)
                writers.append(far_writer)
                far_writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _KERNEL_BYTES)
                with contextlib.closing(far_writer):
                    await _first_to_end(
                        self._carry(reader, far_writer, up=True), self._carry(far_reader, writer, up=False)
                    )
            finally:
                del self._connections[task]

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool) -> None:
        """Carry one direction of a connection, until its end has arrived, too."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUED_CHUNKS)
        releasing = asyncio.create_task(self._release(queue, writer))
        now, data = asyncio.get_running_loop().time, b"-"
        try:
            while data:
                await self._passing.wait()
                bps = self.link.bps(up=up)
                await asyncio.sleep(self._free_s[up] - 8.0 * _QUEUED_BYTES / bps - now())
                chunk = int(min(_CHUNK_BYTES, max(_PACKET_BYTES, bps / 8.0 * _CHUNK_S)))
                data = await self._read(reader, chunk, up=up)
                self._free_s[up] = max(self._free_s[up], now()) + 8.0 * len(data) / self.link.bps(up=up)
                await queue.put((self._free_s[up] + self.link.rtt_ms / 2e3, data))
            await releasing
        finally:
            releasing.cancel()
            await asyncio.gather(releasing, return_exceptions=True)

    async def _read(self, reader: asyncio.StreamReader, most: int, *, up: bool) -> bytes:
        """Return a direction's next bytes, b"" at the end. A reset counts as the end: both take the link's time."""
        try:
            return await reader.read(most)
        except OSError:
            return b""

    async def _release(self, queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        while True:
            due, data = await queue.get()
            await asyncio.sleep(due - asyncio.get_running_loop().time())
            await self._passing.wait()
            if not data:
                return
            writer.write(data)
            await writer.drain()


async def _first_to_end(*ways: Coroutine[Any, Any, None]) -> None:
    """Run these until one ends, and then cancel the others."""
    tasks = [asyncio.create_task(way) for way in ways]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
