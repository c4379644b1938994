"""Test that pauses double, spread out, and end with their budget."""

from __future__ import annotations

import pytest

from outrider.core.backoff import Backoff
from outrider.core.errors import Unavailable


def test_progress_renews_the_budget_and_its_lack_ends_it() -> None:
    now = [0.0]
    backoff = Backoff(10.0, clock=lambda: now[0], draw=lambda: 0.0)
    for _ in range(5):
        backoff.failed(Unavailable("x"))
        now[0] += 9.0
        backoff.progressed()
    backoff.failed(Unavailable("x"))
    now[0] += 11.0
    with pytest.raises(Unavailable):
        backoff.failed(Unavailable("x"))


def test_the_budget_may_be_another_one_after_progress() -> None:
    now = [0.0]
    backoff = Backoff(1.0, later_s=10.0, clock=lambda: now[0], draw=lambda: 0.0)
    for passed, budget_s in ((0.5, 1.0), (9.0, 10.0)):
        for _ in range(2):
            backoff.failed(Unavailable("x"))
            now[0] += passed
        now[0] += budget_s
        with pytest.raises(Unavailable):
            backoff.failed(Unavailable("x"))
        backoff.progressed()


def test_pauses_double_up_to_a_bound_and_honour_the_peers_wish() -> None:
    backoff = Backoff(1e9, draw=lambda: 1.0)
    pauses = []
    for _ in range(8):
        backoff.failed(Unavailable("x"))
        pauses.append(backoff.pause_s())
    assert pauses[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8]) and pauses[-1] == 3.0
    assert backoff.pause_s(60.0) == 60.0


def test_an_attempt_is_due_after_its_pause() -> None:
    now = [100.0]
    backoff = Backoff(first_s=5.0, max_s=600.0, clock=lambda: now[0], draw=lambda: 1.0)
    assert backoff.due_in_s == 0.0
    backoff.failed()
    backoff.failed()
    assert backoff.due_in_s == 10.0
    now[0] += 4.0
    assert backoff.due_in_s == 6.0
    backoff.progressed()
    assert backoff.due_in_s == 0.0
