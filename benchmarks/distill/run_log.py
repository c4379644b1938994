"""Print events and checks as they happen, and keep them for the result and the plots."""

from __future__ import annotations

import time
from dataclasses import dataclass

from benchmarks.support.old_harness import Criterion


@dataclass(frozen=True)
class RunEvent:
    """Describe an event for the log and the plots."""

    unix: float
    text: str
    mark: str
    """Its label in a plot; empty if the plot does not show it."""


class RunLog:
    """Print events with the seconds since the beginning, and keep them for the plots."""

    def __init__(self) -> None:
        self.begun = time.time()
        self.events: list[RunEvent] = []
        self.checks: list[Criterion] = []
        self.outages: list[tuple[float, float]] = []
        """The (begin, end), in Unix seconds, of each outage that the benchmark caused."""

    def log(self, text: str, mark: str = "") -> float:
        """Print a line with the time since the begin, and return the time in Unix seconds."""
        now = time.time()
        self.events.append(RunEvent(now, text, mark))
        print(f"{now - self.begun:7.1f} s  {text}", flush=True)
        return now

    def check(self, what: str, wanted: str, got: object, held: bool) -> None:
        self.checks.append(Criterion(what, wanted, str(got), held))
        print(f"           {'ok      ' if held else 'NOT HELD'}  {what}: wanted {wanted}, got {got}", flush=True)

    @property
    def minutes(self) -> float:
        return (time.time() - self.begun) / 60.0

    @property
    def broken(self) -> list[Criterion]:
        return [check for check in self.checks if not check.met]
