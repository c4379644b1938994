"""Emulate the distance between two processes on one machine: a TCP proxy that delays bytes."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self

from outrider.core.addresses import split_address


class DelayProxy:
    """Passes bytes from a loopback port to and from `target`, each half of `rtt_ms` later."""

    def __init__(self, target: str, rtt_ms: float) -> None:
        self.rtt_ms = rtt_ms
        self.address = ""
        self._target = split_address(target)
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections.add(task := asyncio.current_task())  # type: ignore[arg-type]
        try:
            with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.CancelledError):
                far_reader, far_writer = await asyncio.open_connection(*self._target)
                with contextlib.closing(far_writer):
                    ways = [self._carry(reader, far_writer), self._carry(far_reader, writer)]
                    tasks = [asyncio.create_task(way) for way in ways]
                    try:
                        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        for each in tasks:
                            each.cancel()
                        await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            self._connections.discard(task)  # type: ignore[arg-type]

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one direction, until its end has passed, too."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        releasing = asyncio.create_task(self._release(queue, writer))
        data = b"-"
        try:
            while data:
                data = await reader.read(1 << 14)
                queue.put_nowait((asyncio.get_running_loop().time() + self.rtt_ms / 2e3, data))
            await releasing
        finally:
            releasing.cancel()
            await asyncio.gather(releasing, return_exceptions=True)

    async def _release(self, queue: asyncio.Queue[tuple[float, bytes]], writer: asyncio.StreamWriter) -> None:
        while True:
            due, data = await queue.get()
            await asyncio.sleep(due - asyncio.get_running_loop().time())
            if not data:
                return
            writer.write(data)
            await writer.drain()
