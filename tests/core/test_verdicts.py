"""Verdicts on guesses, in time and late."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.core.acceptance.history import HIT, MISS, SIBLING, UNKNOWN, AcceptanceHistory
from outrider.core.protocol.messages import Append, Attach, SessionLimits
from outrider.core.protocol.verifier import VerifierSession
from outrider.core.verification import Verified


@pytest.mark.parametrize(
    ("guesses", "verdict"), [([7], HIT), ([7, 8], HIT), ([8, 7], SIBLING), ([8], MISS), ([8, 9], MISS), ([], UNKNOWN)]
)
def test_a_position_is_judged_by_its_first_guess_and_then_by_the_others(guesses: list[int], verdict: int) -> None:
    verdicts = AcceptanceHistory()
    verdicts.settle(7, guesses)
    assert verdicts.known() == (b"" if verdict == UNKNOWN else bytes([verdict]))


def test_late_guesses_are_judged_in_the_order_in_which_they_come() -> None:
    verdicts = AcceptanceHistory(position=10)
    for _ in range(3):
        verdicts.settle(7, [])
    verdicts.late(10, right=True)
    verdicts.late(11, right=False)
    verdicts.late(11, right=True)
    verdicts.late(12, right=False)
    assert verdicts.known() == bytes([HIT, SIBLING, MISS])


def test_a_late_guess_never_takes_a_verdict_back() -> None:
    verdicts = AcceptanceHistory()
    verdicts.settle(7, [7])
    verdicts.late(0, right=False)
    verdicts.late(0, right=True)
    assert verdicts.known() == bytes([HIT])


@given(st.lists(st.tuples(st.booleans(), st.integers(-5, 60)), max_size=80), st.integers(1, 8))
def test_only_the_latest_are_kept_and_nothing_from_outside_them_matters(
    calls: list[tuple[bool, int]], most: int
) -> None:
    verdicts = AcceptanceHistory(most=most)
    for settles, position in calls:
        if settles:
            verdicts.settle(1, [1])
        else:
            verdicts.late(position, right=False)
    settled = sum(settles for settles, _ in calls)
    assert verdicts.known() == bytes([HIT] * min(settled, most))


def test_the_protocol_judges_what_came_in_time_what_came_late_and_what_was_not_evaluated() -> None:
    session = VerifierSession(Attach(1, (1, 2)), SessionLimits())
    session.append(Append(1, 1, 0, (0, 0, 1), (5, 6, 7)))  # 5 and 6 for position 0, 7 below 5
    batch = session.batch(())  # a plain step: none of them is evaluated
    session.commit(batch, Verified((5,), ()))
    session.commit(session.batch(()), Verified((9,), ()))  # 7 was wrong
    session.commit(session.batch(()), Verified((4,), ()))  # nobody had guessed
    session.append(Append(1, 4, 2, (0, 4), (4, 3)))  # late: 4 for position 2; 3 below it is in time
    session.commit(session.batch(()), Verified((8,), ()))
    assert session.verdicts.known() == bytes([HIT, MISS, HIT, MISS])


def test_positions_are_counted_once_and_by_the_first_guess() -> None:
    verdicts = AcceptanceHistory()
    for guesses in ([7], [8, 7], [8], []):
        verdicts.settle(7, guesses)
    assert (verdicts.positions, verdicts.right) == (4, 1)
    verdicts.late(3, right=True)  # nobody had guessed there
    verdicts.late(3, right=False)
    verdicts.late(2, right=True)  # the first guess was another
    assert (verdicts.positions, verdicts.right) == (4, 2)
    verdicts.settle(7, [7], counts=False)
    assert (verdicts.positions, verdicts.right) == (4, 2)
    verdicts.restart()
    assert (verdicts.positions, verdicts.right) == (0, 0)
    assert verdicts.known() == bytes([HIT, SIBLING, SIBLING, HIT, HIT])


def test_positions_count_from_the_first_guess_on_that_is_judged() -> None:
    verdicts = AcceptanceHistory()
    for guesses in ([], [], [8], [], [7]):
        verdicts.settle(7, guesses)
    assert (verdicts.positions, verdicts.right) == (3, 1)
    verdicts.late(1, right=True)  # from before: it counts with its own guess
    assert (verdicts.positions, verdicts.right) == (4, 2)
    verdicts.late(3, right=True)  # its position has been counted
    assert (verdicts.positions, verdicts.right) == (4, 3)


def test_a_late_guess_may_be_the_first_one_that_is_judged() -> None:
    verdicts = AcceptanceHistory()
    for _ in range(3):
        verdicts.settle(7, [])
    verdicts.late(1, right=False)
    verdicts.settle(7, [])
    assert (verdicts.positions, verdicts.right) == (2, 0)
    verdicts.restart()
    verdicts.settle(7, [])
    assert (verdicts.positions, verdicts.right) == (0, 0)


@given(
    st.lists(st.tuples(st.sampled_from(["settle", "late", "restart"]), st.integers(0, 40), st.booleans()), max_size=60)
)
def test_no_position_counts_twice_nor_is_right_without_counting(calls: list[tuple[str, int, bool]]) -> None:
    verdicts = AcceptanceHistory()
    settled = 0
    for name, position, flag in calls:
        if name == "settle":
            verdicts.settle(7, [7] if flag else [])
            settled += 1
        elif name == "late":
            verdicts.late(position, right=flag)
        else:
            verdicts.restart()
    assert verdicts.right <= verdicts.positions <= settled


def test_guesses_of_the_draft_before_do_not_count_for_the_next_one() -> None:
    session = VerifierSession(Attach(1, (1, 2)), SessionLimits())
    session.append(Append(1, 1, 0, (0, 1), (5, 6)))
    session.drafts_anew()
    session.append(Append(1, 3, 0, (2, 0), (7, 9)))  # 7 below 6, and 9 beside 5: not the first there
    for token in (5, 6):
        session.commit(session.batch(()), Verified((token,), ()))
    assert (session.verdicts.positions, session.verdicts.right) == (0, 0)
    session.commit(session.batch(()), Verified((7,), ()))
    assert (session.verdicts.positions, session.verdicts.right) == (1, 1)
    assert session.verdicts.known() == bytes([HIT, HIT, HIT])
