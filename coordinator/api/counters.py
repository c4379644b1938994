"""What a coordinator counts for operators: plain numbers on its event loop, added to once a call."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from coordinator.records import WindowDecision
from coordinator.store.redis_store import StoreCounters
from outrider.core.errors import OutriderError
from outrider.core.histogram import CALL_S, LEVELS, STEP_S, Histogram

SPEEDUPS = (0.8, 0.9, 0.98, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)
"""Over streaming."""
PLACEMENTS = tuple((kind, standby) for kind in ("open", "resume") for standby in ("yes", "no"))


def _calls() -> defaultdict[str, Histogram]:
    return defaultdict(lambda: Histogram(CALL_S))


@dataclass
class CoordinatorCounters:
    """Of one process."""

    store: StoreCounters
    calls_s: defaultdict[str, Histogram] = field(default_factory=_calls)
    """By RPC, whatever came of it."""
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By RPC and class of the error."""
    placed: Counter[tuple[str, str]] = field(default_factory=lambda: Counter(dict.fromkeys(PLACEMENTS, 0)))
    """open or resume; and whether there is a standby, yes or no. All are there from the beginning: a rate misses the
    event that makes a series."""
    decide_s: Histogram = field(default_factory=lambda: Histogram(CALL_S))
    """One decision, about all sessions of a verifier."""
    k: Histogram = field(default_factory=lambda: Histogram(LEVELS))
    """Of windows decided, one each second and session, as are the next three."""
    depth: Histogram = field(default_factory=lambda: Histogram(LEVELS))
    draft_wait_s: Histogram = field(default_factory=lambda: Histogram(STEP_S))
    speedup: Histogram = field(default_factory=lambda: Histogram(SPEEDUPS))
    """Predicted."""

    def refuse(self, call: str, error: Exception) -> None:
        """A call ends with this error; a defect is told to its peer as InternalError, and counts as one."""
        self.refused[call, type(error).__name__ if isinstance(error, OutriderError) else "InternalError"] += 1

    def place(self, *, resumed: bool, standby: bool) -> None:
        self.placed["resume" if resumed else "open", "yes" if standby else "no"] += 1

    def decide(self, decisions: Iterable[WindowDecision], seconds: float) -> None:
        """Count the decisions about all sessions of a verifier, which took so many seconds together."""
        self.decide_s.add(seconds)
        for decision in decisions:
            self.k.add(decision.window.k)
            self.depth.add(decision.window.depth)
            self.draft_wait_s.add((decision.window.draft_wait_ms or 0.0) / 1e3)
            self.speedup.add(decision.speedup)
