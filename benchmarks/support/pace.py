"""Emulate a slower machine: each forward pass of n rows takes at least `pass_ms + row_ms * n` milliseconds.

Everything else stays as it is, so that the step times of a large model on an accelerator can be studied without either.
What is measured so is labelled PACED; it stands only where hardly a pass took longer by itself. Passes that read
prompts are paced but not judged: an accelerator reads hundreds of rows in about the time of one, this machine does not,
and so it reads them in its own time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

PASS_MS, ROW_MS, COUNTS, WAITS = "PACED_PASS_MS", "PACED_ROW_MS", "PACED_COUNTS", "PACED_WAITS"
"""Environment variables of a paced verifier."""


@dataclass(frozen=True)
class Pace:
    """Define the least time of a pass, in milliseconds: `pass_ms + row_ms * rows`."""

    pass_ms: float
    row_ms: float = 0.0

    @classmethod
    def of_environment(cls) -> Pace:
        return cls(float(os.environ[PASS_MS]), float(os.environ[ROW_MS]))

    @property
    def environment(self) -> dict[str, str]:
        return {PASS_MS: str(self.pass_ms), ROW_MS: str(self.row_ms)}

    def __str__(self) -> str:
        return f"PACED {self.pass_ms:g} + {self.row_ms:g} n ms"


class PassCounts:
    """Count the passes of a paced verifier that were judged, and those of them that took longer by themselves.

    path: a file that the engine process counts in and others read; without one the counts are this process's own.
    """

    def __init__(self, path: Path | None = None) -> None:
        if path is None:
            self._counts = np.zeros(2, dtype=np.int64)
        else:
            self._counts = np.memmap(path, dtype=np.int64, mode="r+" if path.exists() else "w+", shape=(2,))
        self.begin()

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> PassCounts:
        return cls(Path(environment[COUNTS]) if COUNTS in environment else None)

    def begin(self) -> None:
        """Begin to count for `overran`."""
        self._begun = self._counts.copy()

    def add(self, *, overran: bool) -> None:
        self._counts += (1, overran)

    @property
    def overran(self) -> float:
        """Return the share of passes since `begin`, prompt reading left out, that took longer by themselves."""
        passes, overran = (self._counts - self._begun).tolist()
        return overran / passes if passes else 0.0


@contextmanager
def hold(pace: Pace, counts: PassCounts, rows: int, *, reads: bool = False) -> Iterator[None]:
    """Wait at the end of a pass over so many rows for what is left of its time. reads: some are of a prompt."""
    ends = time.perf_counter() + (pace.pass_ms + pace.row_ms * rows) / 1e3
    yield
    left_s = ends - time.perf_counter()
    if not reads:
        counts.add(overran=left_s < 0.0)
    time.sleep(max(0.0, left_s))
