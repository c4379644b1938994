"""Share times among the engine, the devices and the benchmark, in a file that all of them map into memory."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

MAX_STEPS = 1 << 16
"""Steps whose times are kept: those of 40 minutes."""
BUCKETS = 1 << 18
BUCKET_US = 20
"""Width of a bucket in microseconds; the last one holds 5.2 s and more."""


def now_us() -> int:
    """Return the time in microseconds, by a clock that all processes of the machine share."""
    return time.monotonic_ns() // 1000


class SharedTimes:
    """Holds when the engine sent each step, and how long Appends took from their devices to the engine."""

    def __init__(self, file: Path) -> None:
        """Map the file, which is made if it is not there."""
        size = MAX_STEPS + BUCKETS
        mapped: NDArray[np.int64] = np.memmap(file, np.int64, "r+" if file.exists() else "w+", shape=(size,))
        self._sent_us, self._appends = mapped[:MAX_STEPS], mapped[MAX_STEPS:]

    def note_step(self, step: int) -> None:
        self._sent_us[step % MAX_STEPS] = now_us()

    def since_step_us(self, step: int) -> int:
        """Return the microseconds since the engine began to send the Commits of a step."""
        return now_us() - int(self._sent_us[step])

    def count_append(self, sent_us: int) -> None:
        """Count an Append that has come now."""
        self._appends[min(BUCKETS - 1, (now_us() - sent_us) // BUCKET_US)] += 1

    def appends(self) -> NDArray[np.int64]:
        """Return the number of Appends by their time on the way, in buckets of BUCKET_US."""
        return self._appends.copy()


def quantile_ms(counts: NDArray[np.int64], share: float) -> float:
    """Return the upper edge of the bucket that `share` of all counts do not exceed, in milliseconds; 0 without any."""
    total = int(counts.sum())
    index = int(np.searchsorted(np.cumsum(counts), share * total)) if total else -1
    return (index + 1) * BUCKET_US / 1000
