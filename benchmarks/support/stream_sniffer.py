"""Observe the streams between a device and its verifiers, even after the device has given them up."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from edge_agent.config import EdgeSettings
from edge_agent.sdk.client import AsyncClient
from edge_agent.session.failover import AttachTarget
from outrider.core.protocol.device import Delivery, DeviceSession
from outrider.core.protocol.messages import Commit
from outrider.wire.v1 import session_pb2


@dataclass
class FailoverTrace:
    """Hold the times of one disturbed session, on the monotonic clock; 0 before they are known."""

    signalled: float = 0.0
    noticed: float = 0.0
    """When the device gave up the broken stream."""
    attached: float = 0.0
    """When the next verifier answered with Opened."""
    resumed: float = 0.0
    """When its first Commit was read."""
    addresses: list[str] = field(default_factory=list)
    """Address of the verifier, for each attach."""
    late_commits: int = 0
    """Commits of the old epoch that arrived after the device had moved on."""


class StreamSniffer:
    """Keep a device's streams open, and hand the device what an abandoned verifier still sends."""

    def __init__(self) -> None:
        self.trace = FailoverTrace()
        self._streams: list[_SniffedStream] = []

    def channel(self, target: AttachTarget, channel: grpc.aio.Channel) -> Any:
        """Return a channel whose streams are observed."""
        self.trace.addresses.append(target.address)
        return _SniffedChannel(self, channel)

    def begin(self) -> None:
        """Begin the trace of another session."""
        self.trace = FailoverTrace()

    async def end(self) -> None:
        """Close every stream."""
        streams, self._streams = self._streams, []
        for stream in streams:
            await stream.close()

    def add(self, stream: _SniffedStream) -> None:
        self._streams.append(stream)

    def on_message(self, stream: _SniffedStream, message: session_pb2.ServerMessage) -> None:
        """Record when the stream after the broken one was opened, and when its first tokens came."""
        if len(self._streams) > 1 and self.trace.signalled and stream is self._streams[-1]:
            now = time.monotonic()
            self.trace.attached = self.trace.attached or now
            if message.WhichOneof("kind") == "commit" and message.commit.token:
                self.trace.resumed = self.trace.resumed or now

    def on_late_commit(self, data: bytes) -> None:
        """Hand a Commit of an abandoned stream to the device, among those of the newest stream."""
        self.trace.late_commits += 1
        self._streams[-1].inbox.put_nowait(data)

    def on_given_up(self) -> None:
        if self.trace.signalled:
            self.trace.noticed = self.trace.noticed or time.monotonic()


class _SniffedChannel:
    """Wrap a channel: observe its streams and pass everything else on."""

    def __init__(self, sniffer: StreamSniffer, channel: grpc.aio.Channel) -> None:
        self._sniffer = sniffer
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        open_stream = self._channel.stream_stream(*arguments, **options)
        return lambda **call: _SniffedStream(self._sniffer, open_stream(**call))


class _SniffedStream:
    """Observe one stream. If the device cancels it, it stays open: pings are answered and Commits are kept."""

    def __init__(self, sniffer: StreamSniffer, call: Any) -> None:
        self.inbox: asyncio.Queue[Any] = asyncio.Queue()
        self._sniffer = sniffer
        self._call = call
        self._given_up = False
        self._ended = False
        sniffer.add(self)
        self._reading = asyncio.create_task(self._read())

    async def read(self) -> Any:
        item = await self.inbox.get()
        if isinstance(item, BaseException):
            self._sniffer.on_given_up()
            raise item
        return item

    async def write(self, message: Any) -> None:
        await self._call.write(message)

    async def done_writing(self) -> None:
        await self._call.done_writing()

    def done(self) -> bool:
        return self._ended or self._given_up

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self._call.add_done_callback(callback)

    def cancel(self) -> None:
        if not self.done():
            self._sniffer.on_given_up()
            self.inbox.put_nowait(asyncio.CancelledError())  # as a read of gRPC's ends, although the stream goes on
        self._given_up = True

    async def close(self) -> None:
        self._call.cancel()
        await asyncio.wait({self._reading})

    async def _read(self) -> None:
        try:
            while (data := await self._call.read()) is not grpc.aio.EOF:
                await self._on_message(data)
            self._end(grpc.aio.EOF)
        except (grpc.RpcError, asyncio.CancelledError) as error:
            self._end(error)

    async def _on_message(self, data: bytes) -> None:
        message = session_pb2.ServerMessage.FromString(data)
        if not self._given_up:
            self._sniffer.on_message(self, message)
            self.inbox.put_nowait(data)
        elif message.WhichOneof("kind") == "commit":
            self._sniffer.on_late_commit(data)
        elif message.WhichOneof("kind") == "ping":
            nonce = message.ping.nonce
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                pong = session_pb2.ClientMessage(pong=session_pb2.Pong(nonce=nonce))
                await self._call.write(pong.SerializeToString())

    def _end(self, how: Any) -> None:
        self._ended = True
        self.inbox.put_nowait(how)


class SniffedClient(AsyncClient):
    """Send a client's session streams through a sniffer, but not its bulk channels.

    Its messages carry no checksums, which a Commit of another stream would break before it comes to the session.
    """

    def __init__(self, sniffer: StreamSniffer, **options: Any) -> None:
        settings = options.pop("settings", None) or EdgeSettings()
        super().__init__(**options, settings=settings.model_copy(update={"checksum": False}))
        dial = self._sessions.dial

        def sniffed(target: AttachTarget, *, bulk: bool = False) -> grpc.aio.Channel:
            channel = dial(target, bulk=bulk)
            return channel if bulk else sniffer.channel(target, channel)

        self._sessions.dial = sniffed  # type: ignore[method-assign]


@dataclass
class StaleCommits:
    """Count Commits of an older epoch that reached the device's session."""

    refused: int = 0
    accepted: int = 0


@contextlib.contextmanager
def count_stale() -> Iterator[StaleCommits]:
    """Observe DeviceSession.on_commit without changing what it does."""
    stale, on_commit = StaleCommits(), DeviceSession.on_commit

    def observed(session: DeviceSession, commit: Commit) -> Delivery | None:
        old, before = commit.epoch < session.epoch, len(session.received)
        delivery = on_commit(session, commit)
        if old and delivery is None and len(session.received) == before:
            stale.refused += 1
        elif old:
            stale.accepted += 1
        return delivery

    DeviceSession.on_commit = observed  # type: ignore[assignment,method-assign]
    try:
        yield stale
    finally:
        DeviceSession.on_commit = on_commit  # type: ignore[method-assign]
