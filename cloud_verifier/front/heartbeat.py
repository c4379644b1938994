"""Time the heartbeat of one stream: when a ping is due, the round trip that answers show, the device's silence."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable

from outrider.core.errors import Unavailable
from outrider.wire.v1.session_pb2 import Ping

MAX_PINGS = 64
"""Unanswered pings whose times are kept."""


class Heartbeat:
    """Times pings, their answers and signs of life; it sends nothing itself.

    A sign of life is an Append that passed its checks, or the answer to a ping.
    """

    def __init__(self, interval_s: float, silence_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Ping every `interval_s` seconds, and end the session after `silence_s` seconds without a sign of life."""
        self.rtt_ms = 0.0
        """Round trip in milliseconds; 0 before the first answer."""
        self._last_sample_ms = math.inf
        self._interval_s = interval_s
        self._silence_s = silence_s
        self._clock = clock
        self._alive_at = clock()
        self._pinged_at = -math.inf
        self._sent: dict[int, float] = {}
        """nonce -> time of each ping without an answer"""
        self._nonce = self._heard = 0
        """The nonces of the last ping, and of the last one that was answered."""
        self._lost = False
        """Whether the session was given up: no sign of life brings it back."""

    def sign_of_life(self) -> None:
        self._alive_at = self._clock()

    def until_ping_s(self) -> float:
        """Return the seconds until the next ping is due, at least 0."""
        return max(0.0, self._pinged_at + self._interval_s - self._clock())

    def ping(self, engine_quiet_ms: int = 0) -> Ping:
        """Begin the next ping, which tells the device what was heard of it, and for how long the engine was quiet.

        Raises Unavailable if the device has been silent for too long.
        """
        now = self._clock()
        if self._lost or now - self._alive_at > self._silence_s:
            raise Unavailable(f"the device has been silent for {self._silence_s} s; attach again")
        self._nonce += 1
        self._pinged_at = self._sent[self._nonce] = now
        while len(self._sent) > MAX_PINGS:
            del self._sent[min(self._sent)]
        return Ping(nonce=self._nonce, rtt_ms=self.rtt_ms, heard=self._heard, engine_quiet_ms=engine_quiet_ms)

    def pong(self, nonce: int) -> float | None:
        """Take an answer, update `rtt_ms` and return this round trip in milliseconds; None if no such ping is open.

        The lesser of the last two round trips estimates the path: a queue only adds to one, and a longer path shows
        within two pings.
        """
        sent = self._sent.pop(nonce, None)
        if sent is None:
            return None
        self._heard = max(self._heard, nonce)
        self.sign_of_life()
        sample_ms = 1000.0 * (self._alive_at - sent)
        self.rtt_ms, self._last_sample_ms = min(sample_ms, self._last_sample_ms), sample_ms
        return sample_ms

    async def silence(self) -> None:
        """Return once the device has been silent for too long, and so much longer that `ping` has raised if the stream
        could send; the session is lost then."""
        allowed_s = self._silence_s + 2.0 * self._interval_s
        while not self._lost:
            left_s = self._alive_at + allowed_s - self._clock()
            self._lost = left_s <= 0
            await asyncio.sleep(max(0.0, left_s))
