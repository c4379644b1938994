"""Test that the verifier estimates how likely a pending node is committed, by its own statistics alone."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.acceptance.node_acceptance import NodeAcceptance
from outrider.core.tree import ROOT, TokenTree


def tree(*nodes: tuple[int, int], position: int = 0) -> TokenTree:
    """Return a tree of nodes (parent, token), numbered from 1."""
    made = TokenTree(position)
    for i, (parent, token) in enumerate(nodes, start=1):
        made.add(i, parent, token)
    return made


def test_a_new_session_starts_from_what_all_sessions_taught_and_then_goes_its_own_way() -> None:
    everyone = NodeAcceptance()
    for _ in range(50):
        NodeAcceptance(everyone).observe(1, 0, accepted=True)
    mine = NodeAcceptance(everyone)
    assert mine.probability(1, 0) == everyone.probability(1, 0) > 0.9
    for _ in range(100):
        mine.observe(1, 0, accepted=False)
    assert mine.probability(1, 0) < 0.25


def test_a_nodes_probability_is_the_product_along_the_path_and_order_is_that_of_arrival() -> None:
    acceptance = NodeAcceptance()
    made = tree((ROOT, 5), (ROOT, 6), (1, 7), (2, 8), (3, 9), position=40)
    found = {node: probability for probability, node in acceptance.ranked(made)}
    assert found[1] == acceptance.probability(1, 0)
    assert found[2] == acceptance.probability(1, 1)
    assert found[3] == pytest.approx(acceptance.probability(1, 0) * acceptance.probability(2, 0))
    assert found[4] == pytest.approx(acceptance.probability(1, 1) * acceptance.probability(2, 0))
    assert found[5] == pytest.approx(found[3] * acceptance.probability(3, 0))


@settings(max_examples=80)
@given(
    parents=st.lists(st.integers(0, 40), min_size=1, max_size=40),
    observations=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 5), st.booleans()), max_size=60),
)
def test_any_number_of_best_nodes_is_closed_under_ancestors(
    parents: list[int], observations: list[tuple[int, int, bool]]
) -> None:
    acceptance = NodeAcceptance(NodeAcceptance())
    for observation in observations:
        acceptance.observe(*observation)
    made = TokenTree(3)
    for i, parent in enumerate(parents, start=1):
        made.add(i, min(parent, i - 1), i)
    taken = {ROOT}
    ranked = acceptance.ranked(made)
    assert len(ranked) == len(parents)
    assert [probability for probability, _ in ranked] == sorted(
        (probability for probability, _ in ranked), reverse=True
    )
    for probability, node in ranked:
        assert 0.0 < probability < 1.0
        assert made[node].parent in taken
        taken.add(node)
