"""Cap the CPU time that a device spends on drafting."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

_SAVED_S = 0.1
"""Time whose share may be saved while nothing is drafted."""
_BORROWED_S = 1.0
"""Time whose share may be spent in advance while the verifier waits for nodes."""


class CpuBudget:
    """A budget of CPU seconds that fills at `share` a second; drafting pauses while it is empty.

    Over T seconds at most `share * (T + 0.1)`, and one decode, is spent on drafting ahead. Drafting that the verifier
    waits for may spend up to a second's share in advance, and later pauses make up for it. The debt never exceeds two
    seconds' share, however long one decode takes. Several threads may use one budget.
    share: fraction of one core, 0 < share <= 1, where 1 is no cap. threads: cores that a decode keeps busy.
    """

    def __init__(self, share: float = 1.0, threads: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self._share = share
        self._threads = threads
        self._clock = clock
        self._lock = threading.Lock()
        self._balance_s = _SAVED_S * share
        self._counted = clock()

    @property
    def capped(self) -> bool:
        """Return whether drafting ever has to pause."""
        return self._share < 1.0

    def pause_s(self, *, awaited: bool) -> float:
        """Return how long to pause before the next decode. awaited: whether the verifier waits for its nodes."""
        if not self.capped:
            return 0.0
        with self._lock:
            now = self._clock()
            self._balance_s = min(_SAVED_S * self._share, self._balance_s + self._share * (now - self._counted))
            self._counted = now
            lacking_s = -self._balance_s - (_BORROWED_S * self._share if awaited else 0.0)
        return max(0.0, round(lacking_s / self._share, 6))  # never so short that a clock would not move

    def spend(self, seconds: float) -> None:
        """Charge a decode that took so long by the clock."""
        with self._lock:
            self._balance_s = max(self._balance_s - seconds * self._threads, -2.0 * _BORROWED_S * self._share)
