"""Count over all sessions, in the message that the front process gets, and keep moving averages."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

from outrider.core.histogram import ROWS, STEP_S, WAIT_S
from outrider.wire.v1 import engine_pb2 as pb

POSITIONS = 32
"""Positions of a step for which accepted nodes are counted one by one; nodes beyond them are only in the total."""
_BOUNDS = {"step_s": STEP_S, "rows": ROWS, "first_token_s": WAIT_S, "token_s": STEP_S, "queue_s": WAIT_S}
"""Histogram of the counters -> upper bounds of its buckets."""
DECAY_S = 5.0
"""Seconds in which an event of a rate fades by a factor of e."""
STATES = ("queued", "prefill", "decode", "stalled")
"""States of live sessions. queued: it has had no row yet. prefill: its prompt is being computed. decode: it generates
tokens. stalled: no step takes it until the device confirms more of the tokens that were sent."""


def new_counters() -> pb.EngineCounters:
    """Return counters of an engine that begins, whose histograms are empty."""
    counters = pb.EngineCounters()
    for name, bounds in _BOUNDS.items():
        getattr(counters, name).counts.extend([0] * (len(bounds) + 1))
    return counters


def count_value(counters: pb.EngineCounters, name: str, value: float, times: int = 1) -> None:
    """Add a value to a histogram of the counters, so many times."""
    histogram = getattr(counters, name)
    histogram.counts[bisect_left(_BOUNDS[name], value)] += times
    histogram.sum += value * times


def count_step(counters: pb.EngineCounters, parts_s: Mapping[str, float], rows: int) -> None:
    """Count a step. parts_s: seconds by part, among them the part between this step and the last one."""
    for part, seconds in parts_s.items():
        counters.part_s[part] += seconds
    count_value(counters, "step_s", sum(parts_s.values()) - parts_s.get("between", 0.0))
    count_value(counters, "rows", rows)


def count_commit(counters: pb.EngineCounters, tokens: int, *, gap_s: float, first: bool) -> None:
    """Count the time of a session's commit. gap_s: seconds since its previous one; for the first, since its start."""
    if not first:
        count_value(counters, "token_s", gap_s / tokens, tokens)
        return
    count_value(counters, "first_token_s", gap_s)
    if tokens > 1:
        count_value(counters, "token_s", 0.0, tokens - 1)  # they arrive together with the first token


def count_speculation(
    counters: pb.EngineCounters | pb.SpeculationCounts, sessions: Sequence[tuple[int, int, int]]
) -> None:
    """Count a step of some sessions. sessions: the committed tokens of each, and its device's evaluated and accepted
    nodes."""
    counters.committed += sum([tokens for tokens, _, _ in sessions])
    drafts = [(evaluated, accepted) for _, evaluated, accepted in sessions if evaluated]
    if not drafts:
        return
    counters.evaluated += sum([evaluated for evaluated, _ in drafts])
    counters.accepted += sum([accepted for _, accepted in drafts])
    counters.drafts += len(drafts)
    by_position = counters.accepted_by_position
    if not by_position:
        by_position.extend([0] * POSITIONS)
    for position in range(min(POSITIONS, max(accepted for _, accepted in drafts))):
        by_position[position] += sum([accepted > position for _, accepted in drafts])


class MovingAverage:
    """An exponential moving average; of few samples, the plain mean. alpha: weight of a new sample, 0 to 1."""

    def __init__(self, alpha: float = 0.05) -> None:
        self.value = 0.0
        self._alpha = alpha
        self._samples = 0

    def add(self, sample: float) -> None:
        self._samples += 1
        self.value += max(self._alpha, 1.0 / self._samples) * (sample - self.value)


class Rate:
    """Estimates events per second; an event has the weight exp(-age / DECAY_S)."""

    def __init__(self, now: float) -> None:
        self._start = self._last = now
        self._weighted = 0.0

    def add(self, count: int, now: float) -> None:
        self._weighted = self._decayed(now) + count
        self._last = now

    def per_second(self, now: float) -> float:
        weight = DECAY_S * (1.0 - math.exp(-max(now - self._start, 1e-3) / DECAY_S))
        return self._decayed(now) / weight

    def _decayed(self, now: float) -> float:
        return self._weighted * math.exp(-(now - self._last) / DECAY_S)
