"""At load: what the target's steps cost on this machine, measured in a few seconds. Every step refines it later."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.engine.batch import PackedBatch, Segment
from cloud_verifier.engine.kv_pool import KVPool
from cloud_verifier.engine.model import TargetModel
from outrider.core.step_cost import KNOTS, StepCost

LIMIT_S = 4.0
"""For all measurements; where it is too short for the large steps, those are extrapolated."""
PREFIX = 128
"""Tokens before the rows of each session."""
SESSIONS = 8
"""In the measurement of what a session costs beside its rows."""
ROUNDS = 3
"""After which more only cost time."""


def profile(
    model: TargetModel,
    rows: int = KNOTS[-1],
    *,
    limit_s: float = LIMIT_S,
    clock: Callable[[], float] = perf_counter,
) -> StepCost:
    """rows: the most that a step will have. Takes at most `limit_s`, but for the two smallest steps.

    The least of several timings counts: whatever else runs on the machine only adds to it.
    """
    ends = clock() + limit_s
    bench = _Bench(model, rows, clock)
    best: dict[int, float] = {}
    crowd = float("inf")
    for size in _sizes(rows):
        known = best.get(size, _guess(best, size))
        if len(best) >= 2 and clock() + known > ends:
            continue  # a smaller one of the next round may still fit
        best[size] = min(best.get(size, float("inf")), bench.seconds([size]))
        if size == SESSIONS:
            crowd = min(crowd, bench.seconds([1] * SESSIONS))
    share = (crowd - best[SESSIONS]) / (SESSIONS - 1) if crowd < float("inf") else 0.0
    return StepCost(best, share)


def _sizes(rows: int) -> Iterator[int]:
    """Rounds over the knots, upwards; the small ones once more before, since what runs first is slow."""
    knots = [knot for knot in KNOTS if knot <= rows]
    yield from knots[:5]
    for _ in range(ROUNDS):
        yield from knots


def _guess(best: dict[int, float], size: int) -> float:
    """A step of more rows than any yet, at the cost per row of the largest one."""
    return best[max(best)] * size / max(best) if best else 0.0


class _Bench:
    """Slots of sequences whose keys and values are zero: what is computed from them takes as long as real ones."""

    def __init__(self, model: TargetModel, rows: int, clock: Callable[[], float]) -> None:
        self._model = model
        self._clock = clock
        self._prefix = min(PREFIX, model.max_sequence - 1)
        slots = SESSIONS * self._prefix + max(rows, SESSIONS)
        self._pool = KVPool(model.layers, slots, dtype=model.torch_dtype, device=model.device)
        self._prefixes = [self._pool.allocate(self._prefix) for _ in range(SESSIONS)]

    def seconds(self, rows: list[int]) -> float:
        """Of one forward pass of as many sessions, with these rows each."""
        begun = self._clock()
        segments = [self._segment(prefix, count) for prefix, count in zip(self._prefixes, rows, strict=False)]
        batch = PackedBatch.pack(segments, self._model.device)
        logits = self._model.forward(batch, self._model.attention.plan(segments, self._pool))
        logits.argmax(dim=-1).cpu()  # a GPU works on until its result is asked for
        taken = self._clock() - begun
        for segment in segments:
            self._pool.release(segment.slots)
        return taken

    def _segment(self, prefix: NDArray[np.int32], rows: int) -> Segment:
        """A token and a chain of nodes below it."""
        last = self._model.max_sequence - 1
        return Segment(
            tokens=np.zeros(rows, dtype=np.int64),
            chain=1,
            parents=np.arange(rows - 1, dtype=np.int64),
            positions=np.minimum(self._prefix + np.arange(rows, dtype=np.int64), last),
            prefix=prefix,
            slots=self._pool.allocate(rows),
            wants_logits=True,
        )


def report(cost: StepCost) -> str:
    """For the log."""
    table = cost.table()
    shown = ", ".join(f"{rows} rows {1e3 * table[rows]:.1f} ms" for rows in (1, 8, 32, 128) if rows in table)
    return f"a step takes {shown}; a session {1e3 * cost.share_s:.2f} ms"
