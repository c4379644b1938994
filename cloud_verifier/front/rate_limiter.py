"""How fast one stream may talk: a token bucket."""

from __future__ import annotations

import time
from collections.abc import Callable

NODES_PER_MESSAGE = 32
"""Nodes that cost the engine about as much as the message that brings them, even where it has seen them before."""


class Pace:
    """`burst` messages at once, `per_second` of them over time. Who talks faster is read later, not refused."""

    def __init__(self, per_second: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._left = float(burst)
        self._last = clock()

    def delay_s(self, nodes: int = 0) -> float:
        """Count one message, that brings so many nodes; how long to wait before the next is read."""
        now = self._clock()
        saved = min(self._burst, self._left + self._per_second * (now - self._last))
        self._left = saved - (1.0 + nodes / NODES_PER_MESSAGE)
        self._last = now
        return max(0.0, -self._left / self._per_second)
