"""Pass TCP connections through an emulated wide-area link, where the kernel emulates none.

The proxy handles byte streams, not packets, so loss appears as jitter or a stall. While nothing passes, it stops
reading: the sender writes until its socket's buffer is full and then waits, as on a path whose acknowledgements do not
come back. Nothing is lost when the path returns, because TCP would send it again. One thing differs: the kernel still
accepts connections and acknowledges what fits its buffer, so that only timeouts of the application expire, never those
of TCP, and TCP does not back off.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
import time
from dataclasses import replace
from types import TracebackType
from typing import Self

from benchmarks.support.network_link import (
    MAX_CHUNK_BYTES,
    MAX_RTT_MS,
    Change,
    Link,
    LinkClock,
    LinkDirection,
    LinkEvent,
    Script,
    Stall,
    check_script,
)
from outrider.core.addresses import split_address
from outrider.core.errors import BadRequest

__all__ = ["MAX_RTT_MS", "DelayProxy"]

# For each connection and direction at most 16 MiB are on their way, beside the buffers of asyncio and of the kernel.
# The kernel's would grow to several MiB by itself, which a sender over a slow link would fill before it has to wait.
_QUEUED_CHUNKS = 1_024
_KERNEL_BYTES = 1 << 17
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class DelayProxy:
    """Pass bytes from a loopback port to and from `target` as `link` says, in order.

    Use it as an async context manager. `link`, or `rtt_ms` alone, may be changed at any time: it holds for bytes that
    arrive from then on; those that wait for a slow line keep their times, and later ones their place behind them.
    `script` begins when the context is entered. seed: of the jitter; the n-th chunk of a direction gets the n-th draw.
    """

    def __init__(
        self, target: str, rtt_ms: float = 0.0, *, link: Link | None = None, script: Script = (), seed: int = 0
    ) -> None:
        if link is not None and rtt_ms:
            raise BadRequest("rtt_ms stands beside link; give it in the Link alone", field="rtt_ms")
        check_script(script)
        self._target = split_address(target)
        self.link = link or Link(rtt_ms=rtt_ms)
        self.bytes_up = 0
        """Bytes from clients to the target."""
        self.bytes_down = 0
        self.address = ""
        self._script = script
        self._playing: asyncio.Task[None] | None = None
        self._lanes = {up: LinkDirection(up=up, seed=seed) for up in (True, False)}
        self._time = LinkClock(time.monotonic)
        self._moving = asyncio.Event()
        self._moving.set()
        self._held_until = -math.inf
        self._end_of_stall: asyncio.TimerHandle | None = None
        self._server: asyncio.Server | None = None
        self._connections: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}

    @property
    def rtt_ms(self) -> float:
        return self.link.rtt_ms

    @rtt_ms.setter
    def rtt_ms(self, value: float) -> None:
        self.link = replace(self.link, rtt_ms=value)

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0, limit=MAX_CHUNK_BYTES)
        self._server.sockets[0].setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _KERNEL_BYTES)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        if self._script:
            self.play(self._script)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._server is not None:
            self._server.close()
        if self._end_of_stall is not None:
            self._end_of_stall.cancel()
        self.drop_connections()
        ending = [*self._connections]
        if self._playing is not None:
            self._playing.cancel()
            ending.append(self._playing)
        await asyncio.gather(*ending, return_exceptions=True)

    def play(self, script: Script) -> asyncio.Task[None]:
        """Begin `script` now, in place of one that still runs. The task returned ends with its last step."""
        check_script(script)
        if self._playing is not None:
            self._playing.cancel()
        self._playing = asyncio.create_task(self._play(script, time.monotonic()))
        return self._playing

    async def _play(self, script: Script, began: float) -> None:
        for at_s, change in script:
            await asyncio.sleep(began + at_s - time.monotonic())
            self.apply(change)

    def apply(self, change: Change) -> None:
        """Apply one step of a script now."""
        match change:
            case Link():
                self.link = change
            case Stall(seconds):
                self.stall(seconds)
            case LinkEvent.DROP:
                self.drop_connections()
            case LinkEvent.RESET:
                self.reset_connections()
            case LinkEvent.BLACKHOLE:
                self.blackhole()
            case LinkEvent.LIFT:
                self.lift()

    def drop_connections(self) -> None:
        """Close every connection orderly; new ones are accepted."""
        for task in self._connections:
            task.cancel()

    def reset_connections(self) -> None:
        """Reset every connection on both sides; what was on its way is lost. New ones are accepted."""
        for task, writers in self._connections.items():
            for writer in writers:
                with contextlib.suppress(OSError):  # closed a moment ago
                    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                writer.transport.abort()
            task.cancel()

    def stall(self, seconds: float) -> None:
        """Let nothing pass for so long; within another stall or a blackhole, the later end counts."""
        until = time.monotonic() + Stall(seconds).seconds
        if until > self._held_until:
            self._hold(until)
            self._end_of_stall = asyncio.get_running_loop().call_later(seconds, self.lift)

    def blackhole(self) -> None:
        """Let nothing pass in either direction, not even the end of a connection, until `lift`."""
        self._hold(math.inf)

    def lift(self) -> None:
        """Let everything pass again, as fast as the link allows."""
        self._held_until = -math.inf
        if self._end_of_stall is not None:
            self._end_of_stall.cancel()
        self._time.go()
        self._moving.set()

    def _hold(self, until: float) -> None:
        self._held_until = until
        if self._end_of_stall is not None:
            self._end_of_stall.cancel()
        self._time.hold()
        self._moving.clear()

    async def _until(self, due_s: float) -> None:
        """Wait until the link's time is `due_s` and the link is not held."""
        while self._time.held or self._time.now() < due_s:
            if self._time.held:
                await self._moving.wait()
            else:
                await asyncio.sleep(due_s - self._time.now())

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None:
            return
        writers = self._connections[task] = [writer]
        with contextlib.closing(writer), contextlib.suppress(OSError, asyncio.CancelledError):
            try:
                await self._until(-math.inf)
                far_reader, far_writer = await self._dial()
                writers.append(far_writer)
                far_writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _KERNEL_BYTES)
                with contextlib.closing(far_writer):
                    await self._couple((reader, far_writer), (far_reader, writer))
            finally:
                del self._connections[task]

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Open the connection to the target for one that was accepted. Raises OSError."""
        return await asyncio.open_connection(*self._target, limit=MAX_CHUNK_BYTES)

    async def _couple(self, *ways: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        """Carry bytes both ways until one side ends."""
        tasks = [asyncio.create_task(self._carry(*way, up=way is ways[0])) for way in ways]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, up: bool) -> None:
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUED_CHUNKS)
        releasing = asyncio.create_task(self._release(queue, writer))
        lane, leaves_s, data = self._lanes[up], -math.inf, b"-"
        try:
            while data:
                await self._until(lane.room_at(self.link))
                data = await self._read(reader, self.link.chunk_bytes(up=up), up=up)
                if up:
                    self.bytes_up += len(data)
                else:
                    self.bytes_down += len(data)
                leaves_s = lane.leaves(self.link, self._time.now(), len(data), after_s=leaves_s)
                await queue.put((leaves_s, data))
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
            leaves_s, data = await queue.get()
            await self._until(leaves_s)
            if not data:
                return
            writer.write(data)
            await writer.drain()
