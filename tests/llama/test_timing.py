"""Test that the latency of a decode is measured by its width."""

from __future__ import annotations

import pytest

from outrider.core.errors import BadRequest
from outrider.llama import TreeContext, measure_widths


def test_a_context_with_a_tree_is_refused_and_keeps_it(context: TreeContext) -> None:
    context.reset([1, 2, 3])
    context.decode([0], [10])
    with pytest.raises(BadRequest, match="tree"):
        measure_widths(context)
    assert context.tree_size == 1


def test_the_median_of_all_rounds_is_reported(context: TreeContext) -> None:
    durations = iter([9.0, 1.0, 5.0, 2.0, 5.0, 30.0, 5.0])  # warm-up, then three rounds of two widths
    now = 0.0
    calls = 0

    def clock() -> float:
        nonlocal now, calls
        calls += 1
        # begin/end pairs: warm-up (1, 2), the deadline (3), then rounds of 4 calls and a look at the deadline
        if calls in (2, 5, 7, 10, 12, 15, 17):
            now += next(durations)
        return now

    assert measure_widths(context, widths=(1, 4), repeats=3, budget_s=1e9, clock=clock) == {1: 2.0, 4: 5.0}
