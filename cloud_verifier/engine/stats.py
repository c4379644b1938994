"""Hold the statistics of an engine: the snapshot that its front is given, and the averages and rates behind it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from outrider.core.telemetry import SessionTelemetry, VerifierTelemetry


@dataclass(frozen=True)
class EngineStats:
    """The engine at one moment. Counts are over all sessions since the engine began."""

    verifier: VerifierTelemetry
    """Measurements of the engine itself."""
    sessions: Mapping[str, SessionTelemetry]
    """Live sessions by id, and ended ones that nobody has stopped yet."""
    steps: int
    committed: int
    """Tokens."""
    evaluated: int
    """Nodes of devices; nodes of the server draft are counted in own_evaluated alone."""
    accepted: int
    """Nodes of devices."""
    own_evaluated: int
    """Nodes of the server draft."""
    own_accepted: int
    """Nodes of the server draft."""
    prefilled: int
    """Prompt tokens put into the pool."""
    prefix_hits: int
    """Sessions that began with cached tokens."""
    prefix_tokens: int
    """Cached tokens that those sessions did not have to compute."""
    kv_reserved: int
    """KV slots promised to live sessions; the rest is what a new session can get."""
    kv_cached: int
    """KV slots with tokens that no live session needs; they are free for any session."""
    dead: int
    """Nodes that arrived too late, or below such a node."""
    ignored: int
    """Nodes outside the speculation window of their session."""
    states: Mapping[str, int]
    """Live sessions by state (counters.STATES)."""


class MovingAverage:
    """Average samples with exponential weights; the first samples count by their plain mean."""

    def __init__(self, share: float = 0.05) -> None:
        self.value = 0.0
        self._share = share
        self._samples = 0

    def add(self, sample: float) -> None:
        self._samples += 1
        self.value += max(self._share, 1.0 / self._samples) * (sample - self.value)


class Rate:
    """Estimate events per second, each event weighted by exp(-age / memory_s)."""

    def __init__(self, now: float, memory_s: float = 5.0) -> None:
        self._memory_s = memory_s
        self._start = self._last = now
        self._weighted = 0.0

    def add(self, count: int, now: float) -> None:
        self._weighted = self._decayed(now) + count
        self._last = now

    def per_second(self, now: float) -> float:
        seen = self._memory_s * (1.0 - math.exp(-max(now - self._start, 1e-3) / self._memory_s))
        return self._decayed(now) / seen

    def _decayed(self, now: float) -> float:
        return self._weighted * math.exp(-(now - self._last) / self._memory_s)


class StepCounts:
    """Count what verification steps committed, evaluated and accepted of one session."""

    def __init__(self) -> None:
        self.steps = 0
        self.committed = 0
        self.evaluated = 0
        self.accepted = 0

    def add(self, evaluated: int, accepted: int, committed: int) -> None:
        """Count a step: nodes evaluated and accepted, tokens committed."""
        self.steps += 1
        self.evaluated += evaluated
        self.accepted += accepted
        self.committed += committed
