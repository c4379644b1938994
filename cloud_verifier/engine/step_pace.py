"""A slower machine than this one, for benchmarks: each forward pass takes at least `a + b n` for its n rows.

Everything else stays as it is, so that the step times of a large model on an accelerator can be studied without either.
What is measured so is labelled as paced; it stands only where hardly a pass took longer by itself. Passes that read
prompts are paced but not judged: an accelerator reads hundreds of rows in about the time of one, this machine does not,
and so it reads them in its own time.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class StepPace:
    """Of one target's forward passes."""

    def __init__(self, pass_ms: float, row_ms: float) -> None:
        self._pass_ms = pass_ms
        self._row_ms = row_ms
        self._passes = self._overran = 0

    @property
    def overran(self) -> float:
        """Share of the passes since `begin`, those that read prompts left out, that took longer by themselves."""
        return self._overran / self._passes if self._passes else 0.0

    def begin(self) -> None:
        """Judge passes from now on."""
        self._passes = self._overran = 0

    @contextmanager
    def hold(self, rows: int, *, reads: bool = False) -> Iterator[None]:
        """A pass over so many rows: wait at its end for what is left of its time. reads: some are of a prompt."""
        ends = time.perf_counter() + (self._pass_ms + self._row_ms * rows) / 1e3
        yield
        left_s = ends - time.perf_counter()
        if not reads:
            self._passes += 1
            self._overran += left_s < 0.0
        time.sleep(max(0.0, left_s))
