"""Run one stream of a session: pass the device's messages to the engine, and commits and directives back."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from google.protobuf.message import DecodeError

from cloud_verifier.config import VerifierConfig
from cloud_verifier.engine_process import ipc
from cloud_verifier.engine_process.host import EngineHost
from cloud_verifier.front.counters import FrontCounters, StreamCounters
from cloud_verifier.front.directives import DirectiveState
from cloud_verifier.front.heartbeat import Heartbeat
from outrider.core.errors import BadRequest, OutriderError, ProtocolViolation
from outrider.core.protocol.messages import Directive
from outrider.wire import checks
from outrider.wire.padding import least_bytes, padded
from outrider.wire.ticket import Claims
from outrider.wire.v1 import engine_pb2, session_pb2

Requests = AsyncIterator[session_pb2.ClientMessage]

PING_S = 0.5
"""Seconds between two pings to a device, which show it that the verifier lives."""
SILENCE_S = 20.0
"""Seconds after which a device that answers no ping and sends no Append loses its place and its KV slots."""
MESSAGES_PER_S, BURST = 1_000.0, 200
"""Messages per second that are read from one stream, and how many pass at once beyond that; further ones wait at the
device. An honest device sends a message every 2 ms, and answers to pings."""
FAREWELL_S = 1.0
"""Seconds that a device has to close its side after its last Commit."""
NODES_PER_MESSAGE = 32
"""Nodes that cost the engine about as much as the message that carries them, even if it has seen them before."""


class RateLimiter:
    """Limits messages by a token bucket: `burst` of them pass at once, `per_second` over time.

    A device that sends faster is read later, not refused: what is not read stays with the device by flow control.
    """

    def __init__(self, per_second: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._left = float(burst)
        self._last = clock()

    def delay_s(self, nodes: int = 0) -> float:
        """Count one message with `nodes` nodes; return how many seconds to wait before the next one is read."""
        now = self._clock()
        saved = min(self._burst, self._left + self._per_second * (now - self._last))
        self._left = saved - (1.0 + nodes / NODES_PER_MESSAGE)
        self._last = now
        return max(0.0, -self._left / self._per_second)


class SessionStream:
    """Serves one stream, which is one epoch of one session."""

    def __init__(
        self,
        host: EngineHost,
        config: VerifierConfig,
        attach: session_pb2.Attach,
        claims: Claims,
        vocabulary_size: int,
        counters: FrontCounters,
        *,
        salt: str,
        record: bool,
    ) -> None:
        """Start the session in the engine. Raises Fenced or Unavailable.

        attach: has passed its checks. claims: what the session's ticket allows, or this verifier where it takes no
        tickets. salt: sessions with the same salt share cached prefixes. record: whether the engine records the tokens.
        """
        self.session_id = claims.session_id
        self.epoch = attach.epoch
        self.claims = claims
        self.lossy = attach.sampling.HasField("typical")
        """Whether its acceptance rule lets draft tokens change the output."""
        self.recorded = record
        """Whether the engine sends the session's tokens for the traffic log."""
        self.counters = StreamCounters(counters, claims.tenant if claims.api_key_id else "")
        self.heartbeat = Heartbeat(PING_S, SILENCE_S)
        self.draft_ms = 0.0
        """Time in which the device drafts one level of its tree, as it says; 0 while that is unknown."""
        self._directives = DirectiveState(config.directive, claims.limits)
        self._vocabulary_size = vocabulary_size
        self._limiter = RateLimiter(MESSAGES_PER_S, BURST)
        self._cancelled = False
        self._host = host
        self._inbox = host.register(self.session_id, self.epoch)
        """Events of the engine for this epoch. An event without a kind has the stream look at what else is due."""
        self._next_ping = asyncio.get_running_loop().call_soon(self._wake_for_ping)
        self._ping_due = False
        self._least_bytes = least_bytes(attach)
        self._release_serial = self._announced_serial = 0
        """Serials of the draft releases: the latest, and the one in the last ReleaseNotice."""
        start = engine_pb2.Start(
            attach=attach,
            limits=claims.limits.message,
            directive=config.directive,
            salt=salt,
            draft_release=claims.draft_release,
            record=record,
        )
        self._send(start=start)

    @property
    def rtt_ms(self) -> float:
        """Return the round trip to the device in milliseconds; 0 while it is unknown."""
        return self.heartbeat.rtt_ms

    def opened(self, verifier_id: str) -> session_pb2.ServerMessage:
        answer = session_pb2.Opened(
            epoch=self.epoch,
            verifier_id=verifier_id,
            limits=self.claims.limits.message,
            directive=self._next_directive(),
            vocabulary_size=self._vocabulary_size,
        )
        return padded(session_pb2.ServerMessage(opened=answer), self._least_bytes)

    def set_directive(self, directive: Directive) -> None:
        """Follow a directive of the coordinator: the engine obeys at once, and the device gets it next."""
        self._update_engine(self._directives.set_directive(directive))

    def announce(self, serial: int) -> None:
        """Tell the device once that there are other draft releases."""
        self._release_serial = serial
        if serial > self._announced_serial:
            self._wake()

    def fail(self, error: OutriderError) -> None:
        """End the stream with `error`, after all that is due to the device already."""
        self._inbox.put_nowait(ipc.failure_event(error))

    def close(self) -> None:
        """Release the session in the engine."""
        self._host.release(self.session_id, self.epoch, self._inbox)

    async def run(
        self,
        requests: Requests,
        write: Callable[[session_pb2.ServerMessage], Awaitable[None]],
        on_first_rtt: Callable[[], None],
        on_last: Callable[[], None],
    ) -> None:
        """Write pings, directives, notices and commits until the sequence ends. Raises what else ended the session.

        on_first_rtt: called when the round trip is known. on_last: called when the last Commit is on its way.
        The stream ends when the device has closed its side.
        A device that has closed its side can still receive: it gets what comes before its silence ends the session.
        """
        reading = asyncio.create_task(self._read(requests, on_first_rtt))
        reading.add_done_callback(lambda _: self._wake())
        try:
            while True:
                event = await self._inbox.get()
                if reading.done():
                    reading.result()  # what the device did wrong comes before what is due to it
                kind = event.WhichOneof("kind")
                if kind == "failure":
                    raise ipc.error_from_failure(event.failure)
                if kind == "commit":
                    self.counters.commit(event.commit)
                    await write(padded(session_pb2.ServerMessage(commit=event.commit), self._least_bytes))
                    if self.counters.finish != session_pb2.FINISH_NONE:
                        on_last()
                        # A device on grpc.aio that writes just when its stream ends loses what it has not read yet.
                        await asyncio.wait({reading}, timeout=FAREWELL_S)
                        return
                if self._ping_due or self._directives.changed or self._release_serial > self._announced_serial:
                    for message in self._due():
                        await write(padded(message, self._least_bytes))
        finally:
            self._next_ping.cancel()
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await reading

    async def _read(self, requests: Requests, on_first_rtt: Callable[[], None]) -> None:
        """Check what the device sends, and pass it to the engine, until the device closes its side.

        Raises BadRequest for a message that breaks a bound or the protocol.
        """
        try:
            async for message in requests:
                kind, nodes = message.WhichOneof("kind"), 0
                match kind:
                    case "append":
                        nodes = self._append(message.append)
                    case "cancel":
                        self._cancel(message.cancel)
                    case "pong":
                        self._pong(message.pong, on_first_rtt)
                    case "draft":
                        checks.check_draft_in_use(message.draft)
                        self._send(draft=message.draft)
                    case _:
                        what = f"a message of kind {kind} came mid-stream, must be append, cancel, pong or draft"
                        raise ProtocolViolation(what, field="kind")
                if kind != "pong":  # the round trips are measured even while the engine is behind
                    await self._host.drain()
                if delay_s := self._limiter.delay_s(nodes):
                    await asyncio.sleep(delay_s)
        except DecodeError:  # it comes from outside, and is no defect
            raise BadRequest("a message on the stream cannot be parsed, must be a ClientMessage") from None

    def _append(self, append: session_pb2.Append) -> int:
        """Check all that one message shows; the protocol's state machine in the engine checks what needs the session's
        state. Return the number of its nodes."""
        nodes, most = len(append.token), self.claims.limits.in_flight
        if nodes > most:
            raise ProtocolViolation.bound("nodes in append.token", nodes, f"at most {most}, limits.in_flight")
        checks.check_append(append, vocabulary_size=self._vocabulary_size)
        append.epoch = self.epoch
        self.heartbeat.sign_of_life()
        self.counters.append(append.first_id, nodes)
        self._send(append=append)
        return nodes

    def _cancel(self, cancel: session_pb2.Cancel) -> None:
        """Pass the first Cancel on; further ones change nothing."""
        if cancel.epoch != self.epoch:
            raise ProtocolViolation.bound("cancel.epoch", cancel.epoch, f"{self.epoch}, the stream's")
        if not self._cancelled:
            self._cancelled = True
            self._send(cancel=cancel)

    def _pong(self, pong: session_pb2.Pong, on_first_rtt: Callable[[], None]) -> None:
        """Measure the round trip, and tell the engine."""
        checks.check_pong(pong)
        self.draft_ms = pong.draft_ms
        known = self.heartbeat.rtt_ms > 0.0
        sample_ms = self.heartbeat.pong(pong.nonce)
        if sample_ms is not None:
            self.counters.round_trip(sample_ms)
            self._send(update=engine_pb2.SessionUpdate(rtt_ms=self.heartbeat.rtt_ms))
            if not known:
                on_first_rtt()

    def _due(self) -> Iterator[session_pb2.ServerMessage]:
        """Yield what is due beside commits. Raises Unavailable if the device has been silent for too long."""
        ping_due, self._ping_due = self._ping_due, False
        if ping_due:
            ping = self.heartbeat.ping(self._host.quiet_ms)
            loop = asyncio.get_running_loop()
            self._next_ping = loop.call_later(self.heartbeat.until_ping_s(), self._wake_for_ping)
            yield session_pb2.ServerMessage(ping=ping)
            self._update_engine(self._directives.lapse())
        load = self._host.stats.verifier
        if self._directives.changed or (ping_due and self._directives.outdated(load.step_ms, load.min_acceptance)):
            yield session_pb2.ServerMessage(directive=self._next_directive())
        if self._release_serial > self._announced_serial:
            self._announced_serial = self._release_serial
            yield session_pb2.ServerMessage(release=session_pb2.ReleaseNotice(serial=self._announced_serial))

    def _next_directive(self) -> Directive:
        load = self._host.stats.verifier
        directive = self._directives.next(load.step_ms, load.min_acceptance)
        self.counters.directive(directive)
        return directive

    def _update_engine(self, directive: Directive | None) -> None:
        """Have the engine obey a directive, and the stream send it."""
        if directive is not None:
            self._send(update=engine_pb2.SessionUpdate(directive=directive))
            self._wake()

    def _wake_for_ping(self) -> None:
        self._ping_due = True
        self._wake()

    def _wake(self) -> None:
        self._inbox.put_nowait(engine_pb2.EngineEvent())

    def _send(self, **kind: Any) -> None:
        self._host.send(engine_pb2.EngineRequest(session_id=self.session_id, epoch=self.epoch, **kind))
