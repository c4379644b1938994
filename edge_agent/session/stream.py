"""Wrap one attach's stream in the session protocol's messages."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Self

import grpc

from edge_agent.session.channels import MAX_RTT_S, Channels, VerifierSilent, advice, peer
from edge_agent.session.statistics import Statistics
from outrider.core.errors import Unavailable
from outrider.core.protocol.messages import Commit, Directive, Open, Opened
from outrider.telemetry.traces import call_metadata
from outrider.wire import checks
from outrider.wire.padding import padded
from outrider.wire.status import error_from_rpc, is_unresolved
from outrider.wire.ticket import ticket_metadata
from outrider.wire.v1 import session_pb2 as pb
from outrider.wire.v1 import session_pb2_grpc
from outrider.wire.v1.coordinator_pb2 import Grant

Received = Commit | Opened | Directive | pb.Ping | pb.ReleaseNotice | None
"""A message from the verifier; None for a kind that only newer versions know. A Ping was answered already."""

SILENCE_S = 1.5
"""Silence after which a verifier counts as dead: three heartbeats, which come every 0.5 s whatever its engine does. The
round trip is added. A false alarm costs a second prefill on another verifier, never a token."""
_FAREWELL_S = 0.3
"""Time that a finished stream may take to end by itself."""
_CONNECT_S = 2.0
"""Additional time for a stream's first message: a lost SYN is sent again only after a second (RFC 6298), and no
heartbeat has measured a first peer's distance yet."""
_ENGINE_S = 0.5
"""Additional time for which a verifier's engine may be quiet: the verifier measures it every 0.25 s."""
_UNHEARD_PONGS = 3
"""As many answers to pings must be missing at the verifier: after a pause of this device the older ones are late."""
_LATE_S = 0.5
"""A wait that ends so much later than it should shows that this process has not run: it was suspended, or kept busy."""


class VerifierStream:
    """The stream of one attach, which sends in order without making the caller wait, and answers pings.

    Use it as a context manager. Raises core errors: Unavailable for a stream that broke, VerifierSilent for silence of
    the verifier or its engine, or if the verifier hears nothing from here; no new session uses the channel then.
    """

    def __init__(self, channels: Channels, grant: Grant, statistics: Statistics, draft_ms: Callable[[], float]) -> None:
        """draft_ms: returns the time in which this device drafts one level of its tree; 0 if it drafts nothing."""
        self._channels = channels
        self._ticket, self._address = grant.ticket, grant.address
        self._peer, self._advice = peer(grant), advice(grant)
        self._statistics = statistics
        self._draft_ms = draft_ms
        self._channel = channels.to(grant)
        self._answered = False
        """Whether the verifier has sent anything."""
        self._opened_at = 0.0
        self._allowed_s = channels.timeout(grant.address, SILENCE_S + _CONNECT_S)
        self._pongs: deque[tuple[int, float]] = deque()
        """(nonce, time) of the answers to pings that the verifier has not confirmed"""
        self._outbox: asyncio.Queue[pb.ClientMessage | None] = asyncio.Queue()
        self._call: Any = None
        self._silent = False
        """Whether the verifier was silent for too long, and the call was cancelled for it."""
        self._waits_since = time.monotonic()
        """When this process began to listen for the next message, since it was suspended last."""
        self._tasks: tuple[asyncio.Task[None], ...] = ()

    async def __aenter__(self) -> Self:
        verifier: Any = session_pb2_grpc.VerifierStub(self._channel)  # type: ignore[no-untyped-call]
        self._call = verifier.Session(metadata=(*call_metadata(), *ticket_metadata(self._ticket)))
        pump = asyncio.create_task(self._write())
        self._tasks = pump, asyncio.create_task(self._watch())
        # A write that fails after the end would put an error of its own over the verifier's status (grpc issue 36066).
        self._call.add_done_callback(lambda _: pump.cancel())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self._tasks[1].cancel()  # what comes now is not waited for that long
        if isinstance(error, VerifierSilent):
            self._channels.silent(self._address, self._channel)
        if kind is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_FAREWELL_S):
                    await self._farewell()
        self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    def open(self, message: Open) -> None:
        """Send Open, which must come first."""
        size = self.send(pb.ClientMessage(open=message))
        self._opened_at = time.monotonic()
        self._allowed_s = self._channels.timeout(self._address, SILENCE_S + _CONNECT_S, size)

    def send(self, message: pb.ClientMessage) -> int:
        """Send a message, and return its size in bytes."""
        size = padded(message).ByteSize()
        self._statistics.bytes_up += size
        self._outbox.put_nowait(message)
        return size

    async def receive(self) -> Received:
        """Return the next message. Raises VerifierSilent if none comes in time, Unavailable if the stream ends."""
        message = await self._read()
        if message is grpc.aio.EOF:
            raise Unavailable("the verifier ended the stream before the sequence was finished")
        if message is None:  # from gRPC, for bytes that are no message
            raise Unavailable(f"{self._peer} sent what is no message; is it of another version?")
        self._statistics.bytes_down += message.ByteSize()
        if not self._answered:
            self._answered = True
            self._heard_from(time.monotonic() - self._opened_at)  # at least a round trip; pings tell it exactly later
        kind = message.WhichOneof("kind")
        received: Received = getattr(message, kind) if kind is not None else None
        match received:
            case Commit():
                checks.check_commit(received)
            case Opened():
                checks.check_opened(received)
            case Directive():
                checks.check_directive(received)
            case pb.Ping():
                self._check(received)
                self.send(pb.ClientMessage(pong=pb.Pong(nonce=received.nonce, draft_ms=self._draft_ms())))
        return received

    def _check(self, ping: pb.Ping) -> None:
        """Take in what a ping tells of the verifier. Raises VerifierSilent if its engine is, or hears nothing."""
        checks.check_ping(ping)
        now = time.monotonic()
        if ping.rtt_ms:
            self._channels.rtt_s[self._address] = min(ping.rtt_ms / 1000, MAX_RTT_S)
            self._heard_from(ping.rtt_ms / 1000)
        if ping.engine_quiet_ms > 1000 * (SILENCE_S + _ENGINE_S):
            raise VerifierSilent(f"the engine of {self._peer} has been silent for {ping.engine_quiet_ms} ms")
        while self._pongs and self._pongs[0][0] <= ping.heard:
            self._pongs.popleft()
        if len(self._pongs) >= _UNHEARD_PONGS and now - self._pongs[0][1] > self._allowed_s:
            raise VerifierSilent(
                f"{self._peer} hears nothing from here: the last answer that came was to ping {ping.heard}"
            )
        self._pongs.append((ping.nonce, now))

    def _heard_from(self, rtt_s: float) -> None:
        self._channels.measured(self._address, rtt_s, self._channel)
        self._allowed_s = SILENCE_S + min(rtt_s, MAX_RTT_S)

    async def _read(self) -> Any:
        self._waits_since = time.monotonic()
        try:
            return await self._call.read()
        except grpc.RpcError as error:
            if is_unresolved(error):
                self._channels.retire(self._channel)
            raise error_from_rpc(error, self._peer, self._advice) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._call.done() or task is None or task.cancelling():
                raise
            if not self._silent:
                raise Unavailable("the stream was cancelled by the connection") from None
            raise VerifierSilent(f"{self._peer} has been silent for {self._allowed_s:g} s") from None

    async def _watch(self) -> None:
        """End the stream of a verifier that is silent for too long while this process runs.

        After a suspension, of this process or the whole machine, the verifier has the whole time again: what it has
        sent meanwhile is still on the way. It has it once, or a process that is kept busy would wait forever. The clock
        of the day goes on while a machine sleeps, others may not.
        """
        given: float | None = None
        while (left_s := self._waits_since + self._allowed_s - time.monotonic()) > 0:
            wait_s = min(left_s, _LATE_S)
            due = time.time() + wait_s
            await asyncio.sleep(wait_s)
            if time.time() - due > _LATE_S and self._waits_since != given:
                self._waits_since = given = time.monotonic()
        self._silent = True
        self._call.cancel()

    async def _write(self) -> None:
        """Write what was sent, in order. An error here ends reading too, and is raised there."""
        # Any Exception: a stream that ends meanwhile makes done_writing raise an error that grpc does not export.
        with contextlib.suppress(Exception):
            while (message := await self._outbox.get()) is not None:
                await self._call.write(message)
            await self._call.done_writing()

    async def _farewell(self) -> None:
        """Half-close the stream, and wait until the verifier ends it."""
        self._outbox.put_nowait(None)
        await asyncio.wait(self._tasks[:1])
        with contextlib.suppress(grpc.RpcError):
            while await self._call.read() is not grpc.aio.EOF:
                pass
