"""When something that failed is tried again."""

from __future__ import annotations

import random
import time

_FIRST_S, _MOST_S = 5.0, 600.0


class RetryTimer:
    """Twice as late each time, and never at the same moment on many devices."""

    def __init__(self) -> None:
        self._pause_s = _FIRST_S
        self._at = 0.0

    @property
    def in_s(self) -> float:
        """Seconds until it is due; none where it is."""
        return max(0.0, self._at - time.monotonic())

    def put_off(self) -> None:
        self._at = time.monotonic() + self._pause_s * random.uniform(0.5, 1.0)
        self._pause_s = min(2 * self._pause_s, _MOST_S)

    def now(self) -> None:
        """There is a reason to try it at once."""
        self._at = 0.0

    def reset(self) -> None:
        """It has gone well."""
        self._pause_s, self._at = _FIRST_S, 0.0
