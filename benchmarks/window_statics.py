"""The adaptive window against windows that never change.

A static window is a verifier's own setting, with no coordinator: so it holds from a session's first token on, where an
operator's pin would hold from the first report on, a second later. Each needs a verifier of its own, which costs ten
seconds to start; they are started two at a time, one per core, and stay for both of a machine's cells. What the
verifier prices nodes at stays as it is in all of them.

The best static of a cell is chosen on one half of its prompts and scored on the other, both ways round.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.replay import Outcome
from benchmarks.window_cells import speed
from outrider.core.protocol.messages import Directive

Speeds = Mapping[str, Sequence[float]]
"""Arm -> tokens per second of each prompt."""
ADAPTIVE = "adaptive"
STREAMING = "streaming"


@dataclass(frozen=True)
class Static:
    """A window by levels, as operators are shown it."""

    k: int
    depth: int
    nodes_per_level: int
    patience_ms: int

    def __str__(self) -> str:
        return f"k {self.k}, depth {self.depth}, {self.nodes_per_level} a level, {self.patience_ms} ms"

    @property
    def directive(self) -> Directive:
        return Directive(
            window_nodes=min(64, self.depth * self.nodes_per_level),
            window_depth=self.depth,
            nodes_per_step=self.k * self.nodes_per_level,
            patience_ms=self.patience_ms,
        )


STATICS = (
    Static(2, 4, 2, 8),
    Static(4, 8, 2, 12),
    Static(4, 24, 1, 0),
    Static(8, 24, 2, 8),
    Static(16, 24, 2, 0),
)
"""Beside streaming, in every cell: from shallow to deep, slim and broad, with patience (12 ms: 0.4 of a step of 30) and
without."""


@dataclass(frozen=True)
class Score:
    """Of one cell."""

    best: tuple[str, str]
    """Chosen on the even prompts, and on the odd ones."""
    vs_best: float
    """Adaptive over the best static."""
    over: Mapping[str, float]
    """Arm -> adaptive over it, median over all prompts."""


def speeds(arms: Mapping[str, Sequence[Outcome]]) -> dict[str, list[float]]:
    return {name: [speed(outcome) for outcome in outcomes] for name, outcomes in arms.items()}


def score(cell: Speeds) -> Score:
    """cell: with the adaptive arm and at least one static, of the same prompts, two or more."""
    statics = [name for name in cell if name != ADAPTIVE]
    halves = (slice(0, None, 2), slice(1, None, 2))
    best = tuple(max(statics, key=lambda name: statistics.median(cell[name][half])) for half in halves)
    ratios = [_over(cell, name, half) for name, half in zip(best, reversed(halves), strict=True)]
    over = {name: round(_over(cell, name, slice(None)), 3) for name in statics}
    return Score((best[0], best[1]), round(statistics.fmean(ratios), 3), over)


def _over(cell: Speeds, static: str, prompts: slice) -> float:
    return statistics.median(a / b for a, b in zip(cell[ADAPTIVE][prompts], cell[static][prompts], strict=True))


def best_single(scores: Sequence[Score]) -> tuple[str, float]:
    """The static that is best over all cells, and adaptive over it: the geometric mean over cells."""
    means = {
        name: math.exp(statistics.fmean(math.log(score.over[name]) for score in scores)) for name in scores[0].over
    }
    best = min(means, key=lambda name: means[name])
    return best, round(means[best], 3)
