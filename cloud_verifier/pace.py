"""How fast one stream may talk: a token bucket."""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """`burst` messages at once, `per_second` of them over time. Who talks faster is read later, not refused."""

    def __init__(self, per_second: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._left = float(burst)
        self._last = clock()

    def delay_s(self) -> float:
        """Count one message; how long to wait before the next is read."""
        now = self._clock()
        self._left = min(self._burst, self._left + self._per_second * (now - self._last)) - 1.0
        self._last = now
        return max(0.0, -self._left / self._per_second)
