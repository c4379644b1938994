"""Read one device's messages: limit their rate, check each one, and pass it to the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from cloud_verifier.front.counters import StreamCounters
from cloud_verifier.front.heartbeat import Heartbeat
from outrider.core.errors import BadRequest, ProtocolViolation
from outrider.wire import checks
from outrider.wire.v1 import engine_pb2, session_pb2

Requests = AsyncIterator[session_pb2.ClientMessage]

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


@dataclass(eq=False)
class InboundMessages:
    """Reads and checks what the device sends on one stream after its Open."""

    epoch: int
    in_flight: int
    """The most nodes that one Append may hold."""
    vocabulary_size: int
    limiter: RateLimiter
    heartbeat: Heartbeat
    counters: StreamCounters
    send: Callable[..., None]
    """Passes the kind of an EngineRequest to the engine, as a keyword argument."""
    drain: Callable[[], Awaitable[None]]
    """Waits while the engine is behind with its requests."""
    _cancelled: bool = False

    async def read(self, requests: Requests, on_first_rtt: Callable[[], None]) -> None:
        """Read until the device closes its side. Raises BadRequest for a message that breaks a bound or the protocol.

        on_first_rtt: called when the first answer to a ping has shown the round trip.
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
                        self.send(draft=message.draft)
                    case _:
                        what = f"a message of kind {kind} came mid-stream, must be append, cancel, pong or draft"
                        raise ProtocolViolation(what, field="kind")
                if kind != "pong":  # the round trips are measured even while the engine is behind
                    await self.drain()
                if delay_s := self.limiter.delay_s(nodes):
                    await asyncio.sleep(delay_s)
        except DecodeError:  # it comes from outside, and is no defect
            raise BadRequest("a message on the stream cannot be parsed, must be a ClientMessage") from None

    def _append(self, append: session_pb2.Append) -> int:
        """Check all that one message shows; the protocol's state machine in the engine checks what needs the session's
        state. Return the number of its nodes."""
        nodes = len(append.token)
        if nodes > self.in_flight:
            raise ProtocolViolation.bound("nodes in append.token", nodes, f"at most {self.in_flight}, limits.in_flight")
        checks.check_append(append, vocabulary_size=self.vocabulary_size)
        append.epoch = self.epoch
        self.heartbeat.sign_of_life()
        self.counters.append(append.first_id, nodes)
        self.send(append=append)
        return nodes

    def _cancel(self, cancel: session_pb2.Cancel) -> None:
        """Pass the first Cancel on; further ones change nothing."""
        if cancel.epoch != self.epoch:
            raise ProtocolViolation.bound("cancel.epoch", cancel.epoch, f"{self.epoch}, the stream's")
        if not self._cancelled:
            self._cancelled = True
            self.send(cancel=cancel)

    def _pong(self, pong: session_pb2.Pong, on_first_rtt: Callable[[], None]) -> None:
        """Measure the round trip, and tell the engine."""
        known = self.heartbeat.rtt_ms > 0.0
        sample_ms = self.heartbeat.pong(pong.nonce)
        if sample_ms is not None:
            self.counters.round_trip(sample_ms)
            self.send(update=engine_pb2.SessionUpdate(rtt_ms=self.heartbeat.rtt_ms))
            if not known:
                on_first_rtt()
