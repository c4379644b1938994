"""What the engine's steps take and bring: by the cost model, and by how the last ones went."""

from __future__ import annotations

from time import perf_counter

from cloud_verifier.engine.counters import EngineCounters
from cloud_verifier.engine.stats import MovingAverage
from outrider.core.step_cost import StepCost

PARTS = ("between", "draft", "plan", "forward", "verify", "commit")
"""Of a step, in this order. between: since the last step's end, while there is work. draft: the co-located one's."""
NODES_PRICED = 8
"""Nodes over which the price of one more is averaged."""


class StepTimer:
    """The moments of one step, by perf_counter: a part ends with each lap."""

    def __init__(self, last_end: float | None) -> None:
        """last_end: of the step before; None where there was nothing to do since."""
        begun = perf_counter()
        self.followed = last_end is not None
        self._marks = [begun if last_end is None else last_end, begun]

    @classmethod
    def drafted(cls) -> StepTimer:
        """Of a step that begins behind its draft."""
        watch = cls(None)
        watch.lap()
        return watch

    def lap(self) -> None:
        self._marks.append(perf_counter())

    def parts_s(self) -> dict[str, float]:
        """Seconds of each part; all must have ended."""
        ends = zip(self._marks, self._marks[1:], strict=False)
        return {part: end - begin for part, (begin, end) in zip(PARTS, ends, strict=True)}


class StepProfiler:
    """Every step is entered; averages are over those that generate and prefill nothing."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        """What a forward pass costs; learns from every step."""
        self.counters = EngineCounters()
        self._parts_s = {part: MovingAverage() for part in PARTS}
        self._between_s = MovingAverage()
        self._rows = MovingAverage()
        self._sessions = MovingAverage()
        self._tokens = MovingAverage()
        self._last_end: float | None = None

    def rest(self) -> None:
        """There is nothing to do: what passes until the next step is no part of any."""
        self._last_end = None

    def begin(self) -> StepTimer:
        return StepTimer(self._last_end)

    def end(self) -> None:
        """The step that was begun is over, whatever became of it."""
        self._last_end = perf_counter()

    def enter(self, watch: StepTimer, *, rows: int, sessions: int, tokens: int, prefilled: bool) -> None:
        """A step that has gone well. tokens: that it committed."""
        parts = watch.parts_s()
        self.counters.step(parts, rows)
        self.cost.observe(rows, sessions, sum(parts[part] for part in ("plan", "forward", "verify", "commit")))
        if prefilled:
            return
        for part, seconds in parts.items():
            self._parts_s[part].add(seconds)
        if watch.followed:
            self._between_s.add(parts["between"])
        self._rows.add(rows)
        self._sessions.add(sessions)
        self._tokens.add(tokens)

    @property
    def parts_ms(self) -> dict[str, float]:
        """Milliseconds of each part on average; they sum to 1e3 * step_s."""
        return {part: 1e3 * mean.value for part, mean in self._parts_s.items()}

    @property
    def step_s(self) -> float:
        """From one step's begin to the next one's while there is work; 0 before the first."""
        return sum(mean.value for mean in self._parts_s.values())

    @property
    def between_s(self) -> float:
        """What passes between two steps that follow one another."""
        return self._between_s.value

    @property
    def node_s(self) -> float:
        """Seconds that a node adds to a step as they are at present, on average over the next few."""
        rows, sessions = max(1, round(self._rows.value)), max(1, round(self._sessions.value))
        more, now = self.cost.seconds(rows + NODES_PRICED, sessions), self.cost.seconds(rows, sessions)
        return (more - now) / NODES_PRICED

    @property
    def min_acceptance(self) -> float:
        """0..1: commits per second times seconds per node."""
        return min(1.0, self._tokens.value / self.step_s * self.node_s) if self.step_s else 0.0
