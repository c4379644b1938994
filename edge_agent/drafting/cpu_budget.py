"""A cap on the CPU time that a device spends on drafting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_SAVED_S = 0.1
"""Time whose share may be saved up while nothing is drafted."""
_BORROWED_S = 1.0
"""Time whose share may be spent in advance where the verifier waits for nodes."""


class CpuBudget:
    """An account of CPU seconds that fills at `share` a second; whoever drafts rests while it is empty.

    Over T seconds at most `share * (T + 0.1)` is spent on drafting ahead, and one decode. What is drafted while the
    verifier waits goes first: it may be spent up to a second in advance, and is made good by resting later. No debt is
    greater than two seconds' share, whatever one decode takes.
    share: of one core, 0 < share <= 1; 1 is no cap. threads: that a decode keeps busy. May be used by several threads.
    """

    def __init__(self, share: float = 1.0, threads: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._threads = threads
        self._clock = clock
        self._lock = threading.Lock()
        self._held_s = _SAVED_S * share
        self._counted = clock()

    @property
    def capped(self) -> bool:
        return self._share < 1.0

    def rest_s(self, *, awaited: bool) -> float:
        """Seconds to rest before the next decode. awaited: the verifier waits for what it brings."""
        if not self.capped:
            return 0.0
        with self._lock:
            now = self._clock()
            self._held_s = min(_SAVED_S * self._share, self._held_s + self._share * (now - self._counted))
            self._counted = now
            lacking_s = -self._held_s - (_BORROWED_S * self._share if awaited else 0.0)
        return max(0.0, round(lacking_s / self._share, 6))  # no rest is so short that a clock would not move

    def spent(self, seconds: float) -> None:
        """A decode took so long by the clock."""
        with self._lock:
            self._held_s = max(self._held_s - seconds * self._threads, -2.0 * _BORROWED_S * self._share)
