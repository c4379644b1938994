"""Test that rows for nodes are allocated by acceptance and cost, or evenly."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloud_verifier.engine.row_allocation import Acceptances, CostCurve, by_acceptance


def line(base: float, per_node: float) -> CostCurve:
    """Return the cost of a step in seconds: `base`, and `per_node` for each node."""
    return lambda nodes: base + per_node * nodes


FREE = line(1.0, 0.0)


def test_the_same_node_pays_less_beside_many_sessions() -> None:
    cost = line(0.010, 0.0005)
    assert by_acceptance([(0.3,)], 100, cost) == ((1,), ())
    assert by_acceptance([(0.3,), *([()] * 15)], 100, cost) == ((0,) * 16, ())


def test_rows_go_to_the_best_nodes_whosever_they_are() -> None:
    assert by_acceptance([(0.9, 0.8, 0.7), (0.6, 0.5), ()], 4, FREE)[0] == (3, 1, 0)


every_session = st.lists(
    st.lists(st.floats(0.01, 0.98), max_size=8).map(lambda w: tuple(sorted(w, reverse=True))), min_size=1, max_size=8
)


@settings(max_examples=150)
@given(sessions=every_session, rows=st.integers(0, 40), base=st.floats(0.001, 0.1), per_node=st.floats(0.0, 0.02))
def test_no_other_number_of_best_nodes_promises_more_per_second(
    sessions: list[Acceptances], rows: int, base: float, per_node: float
) -> None:
    counts, _ = by_acceptance(sessions, rows, line(base, per_node))
    assert sum(counts) <= rows

    def rate(taken: list[float]) -> float:
        return (len(sessions) + sum(taken)) / (base + per_node * len(taken))

    chosen = [chance for nodes, count in zip(sessions, counts, strict=True) for chance in nodes[:count]]
    best_first = sorted((chance for nodes in sessions for chance in nodes), reverse=True)[:rows]
    best = max(rate(best_first[:n]) for n in range(len(best_first) + 1))
    assert rate(chosen) == pytest.approx(best, rel=1e-9)
