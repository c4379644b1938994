"""Test the cap on drafting: kept over a second, borrowed against while a session waits, without effect at 1."""

from __future__ import annotations

import pytest

from edge_agent.drafting.cpu_budget import CpuBudget


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def busy(budget: CpuBudget, clock: Clock, *, seconds: float, decode_s: float, awaited: bool = False) -> list[float]:
    """Return when decodes ended, drafting whenever that is allowed."""
    ended = []
    while clock.now < seconds:
        pause = budget.pause_s(awaited=awaited)
        if pause > 0:
            clock.now += pause
            continue
        clock.now += decode_s
        budget.spend(decode_s)
        ended.append(clock.now)
    return ended


@pytest.mark.parametrize("decode_s", [0.001, 0.025])
@pytest.mark.parametrize("share", [0.1, 0.5])
def test_in_no_second_is_more_than_the_share_drafted_ahead(share: float, decode_s: float) -> None:
    clock = Clock()
    ended = busy(CpuBudget(share, clock=clock), clock, seconds=10.0, decode_s=decode_s)
    for begin in (i / 10 for i in range(90)):
        spent = decode_s * sum(begin < end <= begin + 1.0 for end in ended)
        assert spent <= share * 1.1 + 2 * decode_s
    assert decode_s * len(ended) >= 0.95 * share * 10.0  # and what is allowed is used


def test_what_is_waited_for_goes_first_and_is_made_good_later() -> None:
    clock = Clock()
    budget = CpuBudget(0.2, clock=clock)
    budget.spend(0.1)
    assert budget.pause_s(awaited=False) == pytest.approx((0.1 - 0.02) / 0.2)
    assert budget.pause_s(awaited=True) == 0.0
    budget.spend(0.1)
    assert budget.pause_s(awaited=False) == pytest.approx((0.2 - 0.02) / 0.2)


def test_a_whole_core_is_no_cap() -> None:
    budget = CpuBudget(1.0, threads=4)
    budget.spend(1e6)
    assert budget.pause_s(awaited=False) == 0.0
