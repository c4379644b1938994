"""Divide a run into phases with and without a disturbance, so that other work on the machine affects both."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Phase:
    """Hold the span from `begin` to `end`, in seconds of time.monotonic."""

    begin: float
    end: float
    disturbed: bool
    """Whether the disturbance was active."""


@dataclass(frozen=True)
class DeliveryGap:
    """Hold the time between two deliveries to one device."""

    end: float
    """Seconds of time.monotonic."""
    ms: float

    def within(self, phase: Phase) -> bool:
        return phase.begin <= self.end - self.ms / 1000 and self.end <= phase.end


@dataclass
class AlternatingPhases:
    """Keep the phases so far, in order. Times outside them, of warming up and running out, count for neither kind."""

    phases: list[Phase] = field(default_factory=list)

    async def alternate(
        self, disturb: Callable[[float], Awaitable[None]], *, phase_s: float, warm_s: float, until: float
    ) -> None:
        """Wait `warm_s`, then alternate undisturbed phases with phases beside `disturb(end)`, until `until`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(until - time.monotonic()):
                await asyncio.sleep(warm_s)
                while True:
                    with self._noted(disturbed=False):
                        await asyncio.sleep(phase_s)
                    with self._noted(disturbed=True):
                        await disturb(time.monotonic() + phase_s)

    def of(self, gaps: Iterable[DeliveryGap], *, disturbed: bool) -> list[list[float]]:
        """Return the milliseconds of the gaps that lie within each phase of one kind."""
        gaps = list(gaps)
        return [[gap.ms for gap in gaps if gap.within(s)] for s in self.phases if s.disturbed is disturbed]

    @contextlib.contextmanager
    def _noted(self, *, disturbed: bool) -> Iterator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.phases.append(Phase(begin, time.monotonic(), disturbed))
