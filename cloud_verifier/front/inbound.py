"""Read one device's messages: limit their rate, check each one, and pass it to the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from cloud_verifier.front.counters import StreamCounters
from cloud_verifier.front.heartbeat import Heartbeat
from outrider.core.errors import ProtocolViolation
from outrider.wire import codecs
from outrider.wire.v1 import engine_pb2, session_pb2

Requests = AsyncIterator[session_pb2.ClientMessage]

NODES_PER_MESSAGE = 32
"""Nodes that cost the engine about as much as the message that carries them, even if it has seen them before."""


class RateLimiter:
    """A token bucket: `burst` messages at once, `per_second` of them over time.

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


class InboundMessages:
    """Everything that the device sends on one stream after its Open."""

    def __init__(
        self,
        *,
        epoch: int,
        in_flight: int,
        vocabulary_size: int,
        limiter: RateLimiter,
        heartbeat: Heartbeat,
        counters: StreamCounters,
        send: Callable[..., None],
        drain: Callable[[], Awaitable[None]],
    ) -> None:
        """in_flight: the most nodes that one Append may hold. send: passes an EngineRequest's kind to the engine.
        drain: waits while the engine is behind with its requests."""
        self._epoch = epoch
        self._in_flight = in_flight
        self._vocabulary_size = vocabulary_size
        self._limiter = limiter
        self._heartbeat = heartbeat
        self._counters = counters
        self._send = send
        self._drain = drain
        self._cancelled = False

    async def read(self, requests: Requests, on_first_rtt: Callable[[], None]) -> None:
        """Read until the device closes its side. Raises BadRequest for a message that breaks a bound or the protocol.

        on_first_rtt: called when the first answer to a ping has shown the round trip.
        """
        async for message in requests:
            kind = message.WhichOneof("kind")
            match kind:
                case "append":
                    self._append(message.append)
                case "cancel":
                    self._cancel(message.cancel)
                case "pong":
                    self._pong(message.pong, on_first_rtt)
                case "draft":
                    codecs.draft_in_use_from_proto(message.draft)
                    self._send(draft=message.draft)
                case _:
                    raise ProtocolViolation(
                        f"a message of kind {kind} came mid-stream, must be append, cancel, pong or draft", field="kind"
                    )
            if kind != "pong":  # the round trips are measured even while the engine is behind
                await self._drain()
            if delay_s := self._limiter.delay_s(len(message.append.token)):
                await asyncio.sleep(delay_s)

    def _append(self, append: session_pb2.Append) -> None:
        """Check all that one message shows, once: the engine process builds from it unchecked, and the protocol's
        state machine there checks what needs the session's state."""
        if len(append.token) > self._in_flight:
            bound = f"at most {self._in_flight}, limits.in_flight"
            raise ProtocolViolation.bound("nodes in append.token", len(append.token), bound)
        codecs.check_append(append, vocabulary_size=self._vocabulary_size)
        self._heartbeat.sign_of_life()
        self._counters.append(append)
        self._send(append=append)

    def _cancel(self, cancel: session_pb2.Cancel) -> None:
        """Pass the first Cancel on; further ones change nothing."""
        if cancel.epoch != self._epoch:
            raise ProtocolViolation.bound("cancel.epoch", cancel.epoch, f"{self._epoch}, the stream's")
        if not self._cancelled:
            self._cancelled = True
            self._send(cancel=cancel)

    def _pong(self, pong: session_pb2.Pong, on_first_rtt: Callable[[], None]) -> None:
        """Measure the round trip, and tell the engine."""
        known = self._heartbeat.rtt_ms > 0.0
        sample_ms = self._heartbeat.pong(pong.nonce)
        if sample_ms is not None:
            self._counters.round_trip(sample_ms)
            self._send(tune=engine_pb2.Tune(rtt_ms=self._heartbeat.rtt_ms))
            if not known:
                on_first_rtt()
