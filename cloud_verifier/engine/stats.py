"""What the engine tells of itself: snapshots for the service, and the meters behind them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class SessionStats:
    """One session in one epoch; everything is the verifier's own measurement."""

    steps: int = 0
    """Forward passes that committed something."""
    committed: int = 0
    evaluated: int = 0
    """Nodes that went through a forward pass."""
    accepted: int = 0
    """Of them, those that were committed."""
    dead: int = 0
    """Nodes that came too late or below such a one."""
    ignored: int = 0
    """Nodes that no step could take since they were outside the directive's window; each counts once."""
    evaluated_by_depth: tuple[int, ...] = ()
    """Index 0 is depth 1."""
    accepted_by_depth: tuple[int, ...] = ()
    verdicts: bytes = b""
    """On the guesses for its last positions (outrider.core.acceptance.history), oldest first."""
    draft_ms: float = 0.0
    """Of its device for one level of its tree; 0 where it has not shown."""
    nodes_per_level: float = 0.0
    """A level's guess and its siblings; 0 where no node was evaluated."""
    draft_release: str = ""
    """That its device says it drafts with."""
    positions: int = 0
    """Since its first guess with that draft was judged, those without a guess among them."""
    right: int = 0
    """Of them, those where the first guess was right."""


@dataclass(frozen=True)
class EngineStats:
    """The engine at one moment. Times are moving averages over steps that generated and prefilled nothing."""

    live_sessions: int
    steps: int
    committed: int
    evaluated: int
    accepted: int
    own_evaluated: int
    """Nodes of the co-located draft, which the other figures leave out."""
    own_accepted: int
    prefilled: int
    """Prompt tokens put into the pool."""
    prefix_hits: int
    """Sessions that began with cached tokens."""
    prefix_tokens: int
    """Tokens that they did not have to compute."""
    kv_used: int
    """Slots of live sessions."""
    kv_reserved: int
    """Slots promised to live sessions; what is left is what a new one can get."""
    kv_cached: int
    """Slots with tokens that no live session needs; free for whoever asks."""
    kv_capacity: int
    step_ms: float
    """From one step's begin to the next one's while there is work: what a device has to plan with."""
    min_acceptance: float
    """0..1: what a node's time would commit otherwise; one of less worth does not pay."""
    node_ms: float
    """What a node more adds to a step as they are at present, by the cost model."""
    step_cost_ms: Mapping[int, float]
    """The cost model: milliseconds of a step of one session, by its rows."""
    session_cost_ms: float
    """And of each further session, beside its rows."""
    tokens_per_s: float
    """Tokens committed per second of the clock, over the last few seconds."""
    timing_ms: Mapping[str, float]
    """The parts of a step (ledger.PARTS); together they are step_ms."""
    dead: int
    """As in SessionStats, of all sessions so far, as is the next."""
    ignored: int
    states: Mapping[str, int]
    """Live sessions by state (meters.STATES)."""
    sessions: Mapping[str, SessionStats]
    """Live ones, and ended ones that nobody has stopped yet."""


class MovingAverage:
    """Exponentially weighted over samples; the first ones count by their plain mean."""

    def __init__(self, share: float = 0.05) -> None:
        self.value = 0.0
        self._share = share
        self._samples = 0

    def add(self, sample: float) -> None:
        self._samples += 1
        self.value += max(self._share, 1.0 / self._samples) * (sample - self.value)


class Rate:
    """Events per second, weighted by exp(-age / memory_s)."""

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


class Acceptance:
    """Counts of one session, by depth."""

    def __init__(self) -> None:
        self.steps = 0
        self.committed = 0
        self._evaluated: list[int] = []
        self._accepted: list[int] = []

    def add(self, depths: tuple[int, ...], accepted: int, committed: int) -> None:
        """depths: of the nodes evaluated, 1 for a child of the root. accepted: how deep the walk went on them."""
        self.steps += 1
        self.committed += committed
        grown = max(depths, default=0) - len(self._evaluated)
        self._evaluated += [0] * grown
        self._accepted += [0] * grown
        for depth in depths:
            self._evaluated[depth - 1] += 1
        for depth in range(accepted):
            self._accepted[depth] += 1

    def snapshot(self, dead: int) -> SessionStats:
        return SessionStats(
            steps=self.steps,
            committed=self.committed,
            evaluated=sum(self._evaluated),
            accepted=sum(self._accepted),
            dead=dead,
            evaluated_by_depth=tuple(self._evaluated),
            accepted_by_depth=tuple(self._accepted),
        )
