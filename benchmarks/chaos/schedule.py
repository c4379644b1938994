"""Draw which faults happen, in what order and for how long, from a seed."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FaultRate:
    """Says how often a kind of fault is drawn, and between which seconds its length lies."""

    name: str
    hold_s: tuple[float, float]
    weight: float = 1.0


@dataclass(frozen=True)
class PlannedFault:
    """One fault of a schedule: after `pause_s`, for `hold_s`. seed: decides what it strikes."""

    kind: str
    pause_s: float
    hold_s: float
    seed: int


def schedule(rates: Sequence[FaultRate], count: int, seed: int) -> list[PlannedFault]:
    """Return `count` faults: each kind once, as far as there are so many, and the rest by their weights.

    Lengths are drawn evenly on a logarithmic scale, so that short ones are as common as long ones.
    """
    draw = random.Random(seed)
    chosen = [*rates]
    draw.shuffle(chosen)
    del chosen[count:]
    chosen += draw.choices(rates, [rate.weight for rate in rates], k=count - len(chosen))
    draw.shuffle(chosen)
    plan = []
    for rate in chosen:
        low, high = map(math.log, rate.hold_s)
        hold_s = math.exp(draw.uniform(low, high))
        plan.append(PlannedFault(rate.name, draw.uniform(0.2, 0.8), hold_s, draw.getrandbits(32)))
    return plan
