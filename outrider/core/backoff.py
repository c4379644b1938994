"""Decide how long to wait before the next attempt at something that has failed."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

_MAX_DOUBLINGS = 64
"""No pause is longer than this makes it; 2.0 ** 1024 would be no float."""


def backoff_s(
    failures: int, first_s: float, max_s: float, *, jitter: float = 0.5, draw: Callable[[], float] = random.random
) -> float:
    """Return the seconds to wait after so many failures in a row: twice as long each time, at most `max_s`.

    jitter: the greatest share that is taken off at random, so that many clients do not come back at the same moment.
    draw: returns numbers from 0 to 1; 1 takes nothing off.
    """
    pause_s = min(max_s, first_s * 2.0 ** min(max(failures - 1, 0), _MAX_DOUBLINGS))
    return pause_s * (1.0 - jitter * (1.0 - draw()))


class Backoff:
    """Computes the pauses between attempts at one thing, with a budget of time without progress."""

    def __init__(
        self,
        budget_s: float = math.inf,
        *,
        first_s: float = 0.1,
        max_s: float = 3.0,
        later_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """later_s: the budget once there has been progress, if it is another one."""
        self._budget_s = budget_s
        self._later_s = budget_s if later_s is None else later_s
        self._first_s = first_s
        self._max_s = max_s
        self._clock = clock
        self._draw = draw
        self._failures = 0
        self._since: float | None = None
        """Time of the first failure since the last progress."""
        self._due = -math.inf

    @property
    def due_in_s(self) -> float:
        """Return the seconds until the next attempt is due; 0 if it is due now."""
        return max(0.0, self._due - self._clock())

    def failed(self, error: Exception | None = None) -> None:
        """Count a failure. Raises `error` if there has been no progress for longer than the budget."""
        now = self._clock()
        if self._since is None:
            self._since = now
        self._failures += 1
        self._due = now + self.pause_s()
        if error is not None and now - self._since > self._budget_s:
            raise error

    def progressed(self) -> None:
        """Start again with the shortest pause and the whole budget."""
        self._failures, self._since, self._due = 0, None, -math.inf
        self._budget_s = self._later_s

    def pause_s(self, least_s: float = 0.0) -> float:
        """Return the seconds to wait now, at least `least_s`."""
        return max(least_s, backoff_s(self._failures, self._first_s, self._max_s, draw=self._draw))
