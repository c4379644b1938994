"""Test how a request's statistics describe its speed."""

from __future__ import annotations

import pytest

from edge_agent.session.statistics import Statistics


def test_the_rate_does_not_count_what_came_first_however_much_it_was() -> None:
    now = 0.0
    statistics = Statistics(clock=lambda: now)
    for _ in range(25):  # 5 tokens every 10 ms
        now += 0.010
        statistics.delivered(5, 4)
    assert statistics.tokens == 125
    assert statistics.tokens_per_s == pytest.approx(500.0)
    assert statistics.tokens_per_step == 5.0


def test_what_the_draft_wrote_alone_is_no_token_of_a_step() -> None:
    statistics = Statistics(clock=lambda: 1.0)
    statistics.delivered(5, 4)
    for _ in range(20):
        statistics.generated_offline(1)
    assert (statistics.tokens, statistics.tokens_per_step) == (25, 5.0)
