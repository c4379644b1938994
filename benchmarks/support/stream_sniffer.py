"""Between a device and its verifiers: what each stream says and when, even after the device has given it up."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from edge_agent.sdk.client import AsyncClient
from edge_agent.session.failover import AttachTarget
from outrider.core.protocol.device import Delivery, DeviceSession
from outrider.core.protocol.messages import Commit
from outrider.wire.v1 import session_pb2


@dataclass
class FailoverTrace:
    """What one disturbed session went through. Times are of the monotonic clock."""

    signalled: float = 0.0
    noticed: float = 0.0
    """The broken stream was given up."""
    attached: float = 0.0
    """The next verifier answered with Opened."""
    resumed: float = 0.0
    """Its first Commit was read."""
    addresses: list[str] = field(default_factory=list)
    """Of the verifiers attached to, one per hop."""
    zombie_commits: int = 0
    """Commits of the old epoch that came after the device had gone elsewhere."""


class StreamSniffer:
    """A device's channels with the streams' ends held open: what a zombie still says is put before the device."""

    def __init__(self) -> None:
        self.watch = FailoverTrace()
        self._calls: list[_Call] = []

    def channel(self, hop: AttachTarget, under: grpc.aio.Channel) -> Any:
        self.watch.addresses.append(hop.address)
        return _Channel(self, under)

    def begin(self) -> None:
        self.watch = FailoverTrace()

    async def end(self) -> None:
        """Let go of every stream."""
        calls, self._calls = self._calls, []
        for call in calls:
            await call.release()

    def join(self, call: _Call) -> None:
        self._calls.append(call)

    def heard(self, call: _Call, message: Any) -> None:
        """A message of the newest stream."""
        if len(self._calls) > 1 and self.watch.signalled and call is self._calls[-1]:
            now = time.monotonic()
            self.watch.attached = self.watch.attached or now
            if message.WhichOneof("kind") == "commit" and message.commit.token:
                self.watch.resumed = self.watch.resumed or now

    def late(self, message: Any) -> None:
        """A Commit of a stream that the device has given up: the device gets it all the same."""
        self.watch.zombie_commits += 1
        self._calls[-1].inbox.put_nowait(message)

    def given_up(self) -> None:
        if self.watch.signalled:
            self.watch.noticed = self.watch.noticed or time.monotonic()


class _Channel:
    """Taps Session; everything else goes straight through."""

    def __init__(self, tap: StreamSniffer, under: grpc.aio.Channel) -> None:
        self._tap = tap
        self._under = under

    def __getattr__(self, name: str) -> Any:
        return getattr(self._under, name)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        open_stream = self._under.stream_stream(*arguments, **options)
        return lambda **call: _Call(self._tap, open_stream(**call))


class _Call:
    """One stream. Cancelled by the device, it goes on towards its verifier: pings are answered, Commits are kept."""

    def __init__(self, tap: StreamSniffer, under: Any) -> None:
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._tap = tap
        self._under = under
        self._given_up = False
        self._ended = False
        tap.join(self)
        self._reading = asyncio.create_task(self._read())

    async def read(self) -> Any:
        item = await self.inbox.get()
        if isinstance(item, BaseException):
            self._tap.given_up()
            raise item
        return item

    async def write(self, message: Any) -> None:
        await self._under.write(message)

    async def done_writing(self) -> None:
        await self._under.done_writing()

    def done(self) -> bool:
        return self._ended

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._under.add_done_callback(callback)

    def cancel(self) -> None:
        if not self._ended:
            self._tap.given_up()
        self._given_up = True

    async def release(self) -> None:
        self._under.cancel()
        await asyncio.wait({self._reading})

    async def _read(self) -> None:
        try:
            while (message := await self._under.read()) is not grpc.aio.EOF:
                await self._sort(message)
            self._end(grpc.aio.EOF)
        except (grpc.RpcError, asyncio.CancelledError) as error:
            self._end(error)

    async def _sort(self, message: Any) -> None:
        if not self._given_up:
            self._tap.heard(self, message)
            self.inbox.put_nowait(message)
        elif message.WhichOneof("kind") == "commit":
            self._tap.late(message)
        elif message.WhichOneof("kind") == "ping":
            nonce = message.ping.nonce
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                await self._under.write(session_pb2.ClientMessage(pong=session_pb2.Pong(nonce=nonce)))

    def _end(self, how: Any) -> None:
        self._ended = True
        self.inbox.put_nowait(how)


class SniffedClient(AsyncClient):
    def __init__(self, tap: StreamSniffer, **options: Any) -> None:
        super().__init__(**options)
        dial = self._sessions.dial

        def tapped(target: AttachTarget, *, bulk: bool = False) -> grpc.aio.Channel:
            channel = dial(target, bulk=bulk)
            return channel if bulk else tap.channel(target, channel)

        self._sessions.dial = tapped  # type: ignore[method-assign]


@dataclass
class StaleCommits:
    """Commits of an older epoch that reached the device's session."""

    refused: int = 0
    accepted: int = 0


@contextlib.contextmanager
def counting_stale_commits() -> Iterator[StaleCommits]:
    """Look on at DeviceSession.on_commit, and change nothing."""
    stale, on_commit = StaleCommits(), DeviceSession.on_commit

    def watched(session: DeviceSession, commit: Commit) -> Delivery | None:
        old, before = commit.epoch < session.epoch, len(session.received)
        delivery = on_commit(session, commit)
        if old and delivery is None and len(session.received) == before:
            stale.refused += 1
        elif old:
            stale.accepted += 1
        return delivery

    DeviceSession.on_commit = watched  # type: ignore[assignment,method-assign]
    try:
        yield stale
    finally:
        DeviceSession.on_commit = on_commit  # type: ignore[method-assign]
