"""Test that UCB-SpecStop finds the best arm from what it has measured, and where it is too slow to find another."""

from __future__ import annotations

import pytest

from benchmarks.support.ucb_coordinator import UcbWindows
from benchmarks.support.ucb_specstop import MOST_LEVELS, UcbSpecStop
from outrider.core.protocol.messages import SessionLimits
from outrider.core.telemetry import SessionTelemetry, VerifierTelemetry

VERIFIER = VerifierTelemetry(live_sessions=1, step_ms=30.0, step_cost_ms={1: 30.0, 64: 33.0})


def played(bandit: UcbSpecStop, best: int, rounds: int) -> list[int]:
    """Return the levels chosen in rounds of 100 ms, which bring a token less for each level away from the best."""
    chosen = []
    for _ in range(rounds):
        levels = bandit.choose()
        bandit.observe(levels, 0.1, max(1.0, 6.0 - abs(levels - best)))
        chosen.append(levels)
    return chosen


@pytest.mark.parametrize("best", [1, 4, 10])
def test_each_arm_is_tried_once_and_then_the_best_one_is_kept(best: int) -> None:
    chosen = played(UcbSpecStop(), best, 200)
    assert chosen[:MOST_LEVELS] == [*range(1, MOST_LEVELS + 1)]
    assert set(chosen[MOST_LEVELS:]) == {best}


def test_a_greater_weight_of_exploration_tries_neighbours_again() -> None:
    assert len(set(played(UcbSpecStop(beta_s=0.5), 4, 400)[MOST_LEVELS:])) > 1


def test_time_counts_and_not_tokens_alone() -> None:
    bandit = UcbSpecStop(most=2)
    bandit.observe(1, 0.1, 2.0)
    bandit.observe(2, 0.3, 3.0)
    assert bandit.choose() == 1


def test_a_sum_of_rounds_is_judged_and_not_the_mean_of_their_ratios() -> None:
    bandit = UcbSpecStop(most=2, beta_s=0.0)
    for tokens in (1.0, 9.0):
        bandit.observe(1, 0.1, tokens)
    bandit.observe(2, 0.1, 4.0)
    assert bandit.choose() == 1  # 0.02 s a token; the mean of its ratios, 0.056, is above the other's 0.025


def test_nothing_is_forgotten_so_the_longer_the_past_the_later_a_change_is_followed() -> None:
    left = []
    for before in (20, 500):
        bandit = UcbSpecStop()
        played(bandit, 4, before)
        left.append([levels != 4 for levels in played(bandit, 10, 2000)].index(True))
    assert 0 < left[0] < left[1] / 5


def test_rounds_without_a_token_are_no_observation() -> None:
    bandit = UcbSpecStop()
    bandit.observe(1, 1.0, 0.0)
    assert bandit.choose() == 1


def test_a_coordinator_pins_the_next_arm_and_learns_from_the_time_between_two_reports() -> None:
    now = [0.0]
    windows = UcbWindows(lambda: now[0])
    session = SessionTelemetry("s", epoch=1, rtt_ms=50.0, draft_ms=4.0, nodes_per_level=2.0)

    def decided(committed: int, steps: int) -> tuple[int, int]:
        told = SessionTelemetry(
            "s", 1, committed=committed, steps=steps, rtt_ms=50.0, draft_ms=4.0, acceptance_history=b"\x01" * 30
        )
        window = windows.decide(VERIFIER, [told], {}, {}, SessionLimits(), {})[session.session_id].window
        now[0] += 1.0
        return window.k, window.depth

    chosen = [decided(40 * i, 20 * i) for i in range(MOST_LEVELS)]
    assert chosen == [(k, k + 4) for k in range(1, MOST_LEVELS + 1)]  # 50 ms are two steps, and two levels are spare
    tenth_brought_most = decided(40 * MOST_LEVELS + 100, 20 * MOST_LEVELS)
    assert tenth_brought_most == (10, 14)


def test_without_a_cost_of_steps_nothing_is_decided_and_nothing_counted_as_tried() -> None:
    windows = UcbWindows(lambda: 0.0)
    session = SessionTelemetry("s", epoch=1)
    assert windows.decide(VerifierTelemetry(), [session], {}, {}, SessionLimits(), {}) == {}
    assert windows.decide(VERIFIER, [session], {}, {}, SessionLimits(), {})["s"].window.k == 1
