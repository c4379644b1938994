"""Measure what the target's steps cost: for a few seconds when the target is loaded, then in every step."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from time import perf_counter

from cloud_verifier.engine.stats import MovingAverage, count_step
from outrider.core.step_cost import KNOTS, StepCost
from outrider.core.text import counted
from outrider.wire.v1 import engine_pb2 as pb

PARTS = ("between", "draft", "plan", "forward", "verify", "commit")
"""The parts of a step in order. between: since the last step's end, while there is work. draft: by the server draft."""
FURTHER_NODES = 8
"""Number of nodes over which the cost of one more is averaged."""

COHORTS_GAIN = 0.95
"""Share of a joint step's time that two cohorts' steps may take at most to be preferred."""

LIMIT_S = 4.0
"""Longest time of all measurements at load; if it is too short for large steps, those are extrapolated."""
SESSIONS = 8
"""Number of sessions in the measurement of what a session costs beside its rows."""
ROUNDS = 3
"""Number of measurements of each size; more gain nothing."""


class StepProfiler:
    """Times the parts of every step; averages are over steps that prefill nothing.

    cost: what a step costs, at first its forward pass alone; it learns from every step. overlaps: whether the target
    computes while the host works, so that two cohorts may pay.
    """

    def __init__(self, cost: StepCost, counters: pb.EngineCounters, *, overlaps: bool = False) -> None:
        self.cost = cost
        self._forward_s = copy.deepcopy(cost) if overlaps else None
        """What a forward pass alone takes, without the host's work, which `cost` learns too."""
        self.cohorts = 1
        """Of sessions, which step in turn."""
        self._counters = counters
        self._parts_s = {part: MovingAverage() for part in PARTS}
        self._between_s = MovingAverage()
        self._host_s = MovingAverage()
        """Of a session in a step: planning, verification and commit."""
        self._rows = MovingAverage()
        self._sessions = MovingAverage()
        self._tokens = MovingAverage()
        self._last_end: float | None = None
        """When the last step ended, by perf_counter; None if there was nothing to do since."""
        self._begun = self._mark = 0.0
        """When the current step began, and when its last part ended."""
        self._current_s: dict[str, float] = {}
        """Seconds of the parts of the current step that have ended."""
        self._followed = False
        """Whether the current step followed another one without idle time."""
        self._drafted_s = 0.0
        """Seconds of drafting for the next step before it begins."""
        self._last_s = 0.0
        """Seconds of the last step."""

    def idle(self) -> None:
        """Note that there is nothing to do: the time until the next step belongs to no step."""
        self._last_end = None

    def drafted(self, seconds: float) -> None:
        """Count the time of drafting for the next step, which has not begun."""
        self._drafted_s += seconds

    def begin(self, *, goes_on: bool = False) -> None:
        """Begin a step, with what is left of its draft. goes_on: whether one that was begun before is still under way,
        whose parts so far are counted with those that follow."""
        self._begun = self._mark = perf_counter()
        self._followed = self._last_end is not None
        between = self._begun - self._last_end if self._last_end is not None else 0.0
        before = self._current_s if goes_on else {}
        self._current_s = before | {
            part: before.get(part, 0.0) + seconds
            for part, seconds in (("between", max(0.0, between - self._drafted_s)), ("draft", self._drafted_s))
        }

    def restart(self) -> None:
        """Begin the current step anew, after its draft."""
        self._begun = self._mark = perf_counter()
        self._followed = False
        self._current_s = {"between": 0.0, "draft": 0.0}

    def lap(self, part: str) -> None:
        """End a part of the step, one of PARTS."""
        now = perf_counter()
        self._current_s[part] = self._current_s.get(part, 0.0) + now - self._mark
        self._mark = now

    def end(self) -> None:
        """End the step, whatever became of it."""
        self._last_end = perf_counter()
        self._last_s = self._last_end - self._begun
        self._drafted_s = 0.0

    def expected_s(self, rows: int, sessions: int) -> float:
        """Return the seconds that a step should take: as the last one, if its rows cost less, since chunks of a long
        prompt get slower as it grows."""
        return max(self.cost.seconds(rows, sessions), self._last_s)

    def record_step(self, *, rows: int, sessions: int, tokens: int, prefilled: bool, forward_s: float) -> None:
        """Learn from a step that has gone well and all of whose parts have ended. tokens: that it committed. forward_s:
        seconds of its forward pass; the part `forward` is only the time for which the host has waited for it.

        With two cohorts the parts before `forward` are those of the other cohort's next step, which is much the same.
        """
        parts, self._current_s = self._current_s, {}
        count_step(self._counters, parts, rows)
        host_s = sum(parts.get(part, 0.0) for part in ("plan", "verify", "commit"))
        self.cost.observe(rows, sessions, forward_s + host_s)
        if self._forward_s is not None:
            self._forward_s.observe(rows, sessions, forward_s)
        if prefilled:
            return
        for part, seconds in parts.items():
            self._parts_s[part].add(seconds)
        if self._followed and "between" in parts:
            self._between_s.add(parts["between"])
        self._host_s.add(host_s / sessions)
        self._rows.add(rows)
        self._sessions.add(sessions)
        self._tokens.add(tokens)

    def cohorts_pay(self, sessions: int) -> bool:
        """Return whether so many sessions get on faster in two cohorts, one computed while the host works for the
        other, than together: two forward passes of half of them, or the host's work if that takes longer, against one
        forward pass of all and the host's work after it.

        The host's work is kept apart: with it, a size that has not been seen yet would be priced by guess.
        """
        if self._forward_s is None or sessions < 2 or not self._sessions.value:
            return False
        each, host_s = self._rows.value / self._sessions.value, sessions * self._host_s.value
        half = -(-sessions // 2)
        halves_s = 2.0 * self._forward_s.seconds(round(each * half), half)
        together_s = self._forward_s.seconds(round(each * sessions), sessions) + host_s
        return max(halves_s, host_s) < COHORTS_GAIN * together_s

    @property
    def parts_ms(self) -> dict[str, float]:
        """Mean milliseconds of each part of a step, the waiting for the other cohort's forward pass included."""
        return {part: 1e3 * mean.value for part, mean in self._parts_s.items()}

    @property
    def step_s(self) -> float:
        """Mean seconds from the begin of a session's step to that of its next one while there is work; 0 before the
        first."""
        return self.cohorts * sum(mean.value for mean in self._parts_s.values())

    @property
    def token_s(self) -> float:
        """Mean seconds in which a token is committed, whatever session it belongs to; infinite before the first."""
        return self.step_s / self.cohorts / self._tokens.value if self._tokens.value else math.inf

    @property
    def between_s(self) -> float:
        """Mean seconds between two steps that follow one another."""
        return self._between_s.value

    @property
    def node_s(self) -> float:
        """Return the seconds that one more node adds to a step like the recent ones, on average over FURTHER_NODES."""
        rows, sessions = max(1, round(self._rows.value)), max(1, round(self._sessions.value))
        more, now = self.cost.seconds(rows + FURTHER_NODES, sessions), self.cost.seconds(rows, sessions)
        return (more - now) / FURTHER_NODES

    @property
    def min_acceptance(self) -> float:
        """Return the least acceptance (0..1) at which a node pays: commits per second times seconds per node."""
        return min(1.0, self.node_s / self.token_s)


def measure_cost(seconds: Callable[[Sequence[int]], float], rows: int, sessions: int = SESSIONS) -> StepCost:
    """Measure steps of up to `rows` rows for at most LIMIT_S seconds; the two smallest are always measured.

    The least of several timings counts: whatever else runs on the machine only adds to it.
    sessions: the most that a step can have. seconds: runs one step over as many sessions, with these rows each, and
    returns how long it took.
    """
    ends = perf_counter() + LIMIT_S
    best: dict[int, float] = {}
    crowd = float("inf")
    knots = [knot for knot in KNOTS if knot <= rows]
    for size in (*knots[:5], *ROUNDS * knots):  # the small ones once more, since what runs first is slow
        if len(best) >= 2:
            largest = max(best)
            expected = best.get(size, best[largest] * size / largest)  # a new size at the cost per row of the largest
            if perf_counter() + expected > ends:
                continue  # a smaller size of the next round may still fit
        best[size] = min(best.get(size, float("inf")), seconds([size]))
        if size == SESSIONS <= sessions:
            crowd = min(crowd, seconds([1] * SESSIONS))
    share = (crowd - best[SESSIONS]) / (SESSIONS - 1) if crowd < float("inf") else 0.0
    return StepCost(best, share)


def describe(cost: StepCost) -> str:
    """Return a line for the log."""
    table = cost.table()
    shown = ", ".join(f"{counted(rows, 'row')} {1e3 * table[rows]:.1f} ms" for rows in (1, 8, 32, 128) if rows in table)
    return f"a step takes {shown}; a session {1e3 * cost.share_s:.2f} ms"
