"""A TCP proxy that adds delay: WAN emulation for tests, demo and benchmarks where the kernel has none."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType
from typing import Self

from outrider.core.errors import BadRequest
from outrider.wire.channels import split_address

MAX_RTT_MS = 60_000.0
_READ_BYTES = 1 << 16
_QUEUED_CHUNKS = 1_024


class DelayProxy:
    """Listens on a loopback port and passes bytes to and from `target`, each `rtt_ms / 2` late, in order.

    Use as an async context manager. `rtt_ms` may be changed at any time; it holds for bytes that arrive from then on.
    """

    def __init__(self, target: str, rtt_ms: float = 0.0) -> None:
        if not 0.0 <= rtt_ms <= MAX_RTT_MS:
            raise BadRequest.bound("rtt_ms", rtt_ms, f"from 0 to {MAX_RTT_MS:.0f}")
        self._target = split_address(target)
        self.rtt_ms = rtt_ms
        self.bytes_up = 0
        """Bytes from clients to the target."""
        self.bytes_down = 0
        self.address = ""
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        self.drop_connections()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def drop_connections(self) -> None:
        """Cut every connection; new ones are accepted."""
        for task in self._connections:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            return
        self._connections.add(task)
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.CancelledError):
            try:
                far_reader, far_writer = await asyncio.open_connection(*self._target)
                with contextlib.closing(far_writer):
                    await self._couple((reader, far_writer), (far_reader, writer))
            finally:
                self._connections.discard(task)

    async def _couple(self, *ways: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        """Until one side ends."""
        tasks = [asyncio.create_task(self._carry(*way, up=way is ways[0])) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool) -> None:
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUED_CHUNKS)

        async def release() -> None:
            while True:
                due, data = await queue.get()
                if (wait := due - loop.time()) > 0:
                    await asyncio.sleep(wait)
                if not data:
                    return
                writer.write(data)
                await writer.drain()

        releasing = asyncio.create_task(release())
        try:
            while True:
                data = await reader.read(_READ_BYTES)
                if up:
                    self.bytes_up += len(data)
                else:
                    self.bytes_down += len(data)
                await queue.put((loop.time() + self.rtt_ms / 2000.0, data))
                if not data:
                    await releasing
                    return
        finally:
            releasing.cancel()
            await asyncio.gather(releasing, return_exceptions=True)
