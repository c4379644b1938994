"""Counts of values by size, for whoever is measured step by step: adding one is a bisection and two additions."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

STEP_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0)
"""Upper bounds in seconds: of steps, round trips and what passes between two tokens."""
WAIT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""In seconds: of waits and first tokens."""
CALL_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""In seconds: of calls within a data centre."""
ROWS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)
"""Of a step, or nodes."""
LEVELS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0)
"""Of a tree."""


class Histogram:
    """One writer, no lock: whoever reads from elsewhere is sent a copy."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        """bounds: the greatest value of each bucket, rising; one more bucket holds what exceeds them all."""
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def total(self) -> int:
        """Values that were added."""
        return sum(self.counts)

    @classmethod
    def of(cls, bounds: Sequence[float], counts: Sequence[int], total: float) -> Histogram:
        """The copy of one with these bounds; empty where it had others or was never filled."""
        copy = cls(bounds)
        if len(counts) == len(copy.counts):
            copy.counts, copy.sum = list(counts), total
        return copy
