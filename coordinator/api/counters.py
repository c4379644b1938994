"""Count what a coordinator does, for its metrics: plain numbers on the event loop, added to once a call."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from coordinator.records import WindowDecision
from coordinator.store.redis_store import StoreCounters, call_histograms
from outrider.core.errors import OutriderError
from outrider.core.histogram import CALL_S, LEVELS, Histogram

SPEEDUPS = (0.8, 0.9, 0.98, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0)
"""Histogram bounds of a speed-up over plain streaming."""
PLACEMENTS = tuple((kind, standby) for kind in ("open", "resume") for standby in ("yes", "no"))


@dataclass
class CoordinatorCounters:
    """The counts of one coordinator process since it began."""

    store: StoreCounters
    calls_s: defaultdict[str, Histogram] = field(default_factory=call_histograms)
    """Seconds per call, by RPC, whether or not it succeeded."""
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Failed calls, by RPC and class of the error."""
    placed: Counter[tuple[str, str]] = field(default_factory=lambda: Counter(dict.fromkeys(PLACEMENTS, 0)))
    """Placements, by kind (open or resume) and whether there is a standby (yes or no). All series exist from the
    beginning: a rate misses the event that creates one."""
    decide_s: Histogram = field(default_factory=lambda: Histogram(CALL_S))
    """CPU seconds per decision on all sessions of a verifier."""
    window_k: Histogram = field(default_factory=lambda: Histogram(LEVELS))
    """Speculation lengths that were decided, one for each second and session."""
    speedup: Histogram = field(default_factory=lambda: Histogram(SPEEDUPS))
    """Predicted of these windows, over plain streaming."""

    def refuse(self, call: str, error: Exception) -> None:
        """Count a call that ends with this error. A defect counts as InternalError, which is what the peer gets."""
        self.refused[call, type(error).__name__ if isinstance(error, OutriderError) else "InternalError"] += 1

    def decide(self, made: Iterable[WindowDecision], seconds: float) -> None:
        """Count the decisions about all sessions of a verifier, which took so many seconds together."""
        self.decide_s.add(seconds)
        for decision in made:
            self.window_k.add(decision.window.k)
            self.speedup.add(decision.speedup)
