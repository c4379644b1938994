"""Test that proposals are judged position by position, whether they come in time or late."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from session_messages import append, attach

from outrider.core.acceptance.history import HIT, MISS, SIBLING, UNKNOWN, AcceptanceHistory
from outrider.core.protocol.messages import SessionLimits
from outrider.core.protocol.verifier import VerifierSession
from outrider.core.verification import Verified, tree_batch_of


@pytest.mark.parametrize(
    ("proposals", "outcome"), [([7], HIT), ([7, 8], HIT), ([8, 7], SIBLING), ([8], MISS), ([8, 9], MISS), ([], UNKNOWN)]
)
def test_a_position_is_judged_by_its_first_proposal_and_then_by_the_others(proposals: list[int], outcome: int) -> None:
    history = AcceptanceHistory()
    history.commit(7, proposals)
    assert history.outcomes() == (b"" if outcome == UNKNOWN else bytes([outcome]))


def test_the_protocol_judges_what_came_in_time_what_came_late_and_what_was_not_evaluated() -> None:
    session = VerifierSession(attach(1, (1, 2)), SessionLimits())
    session.append(append(1, 1, 0, (0, 0, 1), (5, 6, 7)))  # 5 and 6 for position 0, 7 below 5
    batch = tree_batch_of(session.tree, ())  # a plain step: none of them is evaluated
    session.commit(batch, Verified((5,), ()))
    session.commit(tree_batch_of(session.tree, ()), Verified((9,), ()))  # 7 was wrong
    session.commit(tree_batch_of(session.tree, ()), Verified((4,), ()))  # nothing was proposed
    session.append(append(1, 4, 2, (0, 4), (4, 3)))  # late: 4 for position 2; 3 below it is in time
    session.commit(tree_batch_of(session.tree, ()), Verified((8,), ()))
    assert session.history.outcomes() == bytes([HIT, MISS, HIT, MISS])


@given(
    st.lists(st.tuples(st.sampled_from(["commit", "late", "restart"]), st.integers(0, 40), st.booleans()), max_size=60)
)
def test_no_position_counts_twice_nor_is_right_without_counting(calls: list[tuple[str, int, bool]]) -> None:
    history = AcceptanceHistory()
    committed = 0
    for name, position, flag in calls:
        if name == "commit":
            history.commit(7, [7] if flag else [])
            committed += 1
        elif name == "late":
            history.late(position, accepted=flag)
        else:
            history.restart()
    assert history.first_accepted <= history.positions <= committed


def test_proposals_of_the_draft_before_do_not_count_for_the_next_one() -> None:
    session = VerifierSession(attach(1, (1, 2)), SessionLimits())
    session.append(append(1, 1, 0, (0, 1), (5, 6)))
    session.change_draft()
    session.append(append(1, 3, 0, (2, 0), (7, 9)))  # 7 below 6, and 9 beside 5: not the first there
    for token in (5, 6):
        session.commit(tree_batch_of(session.tree, ()), Verified((token,), ()))
    assert (session.history.positions, session.history.first_accepted) == (0, 0)
    session.commit(tree_batch_of(session.tree, ()), Verified((7,), ()))
    assert (session.history.positions, session.history.first_accepted) == (1, 1)
    assert session.history.outcomes() == bytes([HIT, HIT, HIT])
