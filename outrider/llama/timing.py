"""Measure the seconds of a decode on this device by width, by which the device chooses the shape of its tree."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

from outrider.core.errors import BadRequest
from outrider.llama.tree_context import TIP, TreeContext


def measure_widths(
    context: TreeContext,
    widths: Sequence[int] = (1, 2, 4, 8, 16),
    repeats: int = 5,
    *,
    budget_s: float = 0.3,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[int, float]:
    """Return the median seconds of one decode of W new nodes, for every width W; the context is left as it was.

    Widths take turns, so that a busy moment spoils none of them alone. No new round begins after `budget_s` except the
    first, so that a large model is measured once. The cost of attention grows with the tokens held: measure after
    prefill to include it. Raises BadRequest if there is a tree, TreeFull if a width does not fit.
    """
    if context.tree_size:
        raise BadRequest.bound("context", f"holding {context.tree_size} nodes", "without a tree (commit or drop it)")
    if not widths or min(widths) < 1 or repeats < 1:
        raise BadRequest.bound(
            "widths", f"{list(widths)} x {repeats}", "at least one width and one repeat, all above 0"
        )
    empty = context.length == 0
    if empty:
        context.reset([0])
    samples: dict[int, list[float]] = {width: [] for width in widths}
    try:
        _decode_once(context, max(widths), clock)  # the first decode of a context pays for its buffers
        deadline = clock() + budget_s
        for round_ in range(repeats):
            if round_ and clock() >= deadline:
                break
            for width in samples:
                samples[width].append(_decode_once(context, width, clock))
    finally:
        if empty:
            context.clear()
    return {width: statistics.median(seconds) for width, seconds in samples.items()}


def _decode_once(context: TreeContext, width: int, clock: Callable[[], float]) -> float:
    """Return the seconds of one decode of `width` children of the tip."""
    tokens = [i % context.vocab_size for i in range(width)]
    begin = clock()
    context.decode([TIP] * width, tokens)
    seconds = clock() - begin
    context.drop_tree()
    return seconds
