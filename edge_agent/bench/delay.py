"""Delay connections as a distant cluster does, on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator, Mapping
from typing import Self

from outrider.core.addresses import split_address


class DelayedAddresses(Mapping[str, str]):
    """Maps every HOST:PORT to an address on loopback that leads there, each byte half of `rtt_ms` later.

    It is an async context manager. A proxy starts when its address is looked up first, so that a client takes this as
    its `reroute` before it knows the cluster's verifiers. Without a delay addresses stay as they are.
    """

    def __init__(self, rtt_ms: float) -> None:
        self._rtt_ms = rtt_ms
        self._ways: dict[str, str] = {}
        self._serving: set[asyncio.Task[None]] = set()

    def __getitem__(self, target: str) -> str:
        if not self._rtt_ms:
            return target
        if target not in self._ways:
            listening = socket.create_server(("127.0.0.1", 0))
            self._ways[target] = f"127.0.0.1:{listening.getsockname()[1]}"
            self._serving.add(asyncio.create_task(self._serve(target, listening)))
        return self._ways[target]

    def __iter__(self) -> Iterator[str]:
        return iter(self._ways)

    def __len__(self) -> int:
        return len(self._ways)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await _ended(self._serving)

    async def _serve(self, target: str, listening: socket.socket) -> None:
        """Pass connections of a socket to HOST:PORT `target` until this is cancelled."""
        delay_s = self._rtt_ms / 2000
        loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()

        async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            due = 0.0
            while data := await reader.read(1 << 16):
                due = max(due + 1e-6, loop.time() + delay_s)  # timers of the same moment have no order
                loop.call_at(due, writer.write, data)
            await asyncio.sleep(max(due + 1e-6 - loop.time(), delay_s))
            writer.close()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if (task := asyncio.current_task()) is not None:
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.CancelledError):
                far_reader, far_writer = await asyncio.open_connection(*split_address(target))
                with contextlib.closing(far_writer):
                    await asyncio.gather(carry(reader, far_writer), carry(far_reader, writer))

        server = await asyncio.start_server(accept, sock=listening)
        try:
            await asyncio.Event().wait()
        finally:
            server.close()
            await _ended(tasks)


async def _ended(tasks: set[asyncio.Task[None]]) -> None:
    """Cancel the tasks, and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
