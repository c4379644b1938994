"""Count values by size, cheaply enough for every step: adding one is a bisection and two additions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

STEP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
"""Upper bounds in seconds for steps, round trips and the time between two tokens."""
WAIT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds in seconds for waits and first tokens."""
CALL_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Upper bounds in seconds for calls within a data centre."""
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
"""Upper bounds for the rows of a step, or for nodes."""
LEVELS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0)
"""Upper bounds for the levels of a tree."""


class Histogram:
    """Counts of values in buckets, which have one writer and no lock; other threads and processes get a copy."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """Take `bounds`, the greatest value of each bucket, rising; one more bucket counts what exceeds them all."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def total(self) -> int:
        """Return the number of values that were added."""
        return sum(self.counts)

    @classmethod
    def of(cls, bounds: Sequence[float], counts: Sequence[int], total: float) -> Histogram:
        """Return a histogram with these counts; an empty one if the counts are for other bounds."""
        copy = cls(bounds)
        if len(counts) == len(copy.counts):
            copy.counts, copy.sum = list(counts), total
        return copy
