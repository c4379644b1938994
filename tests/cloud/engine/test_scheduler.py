"""Test which sessions are served in a step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from even_allocation import evenly

from cloud_verifier.engine.row_allocation import AllocationPolicy, by_acceptance
from cloud_verifier.engine.scheduler import (
    CHUNK,
    PROMPT_BURST_S,
    PROMPT_SHARE,
    RowAllocation,
    StepBudget,
    StepCandidate,
    StepPlan,
    Wait,
    schedule,
)
from outrider.core.step_cost import StepCost

BUDGET = StepBudget(rows=64)
NOW = 100.0


def candidate(session_id: str = "s", **changes: Any) -> StepCandidate:
    """Return a session without nodes that committed just now and waits up to 10 ms for a device 2 ms away."""
    values: dict[str, Any] = {
        "pending": 1,
        "acceptances": (),
        "may_step": True,
        "idle": False,
        "draft_wait_s": 0.010,
        "rtt_s": 0.001,
        "answers_s": 0.002,
        "gain": 4.0,
        "last_commit": NOW,
        "skipped": 0,
    }
    nodes = changes.pop("nodes", None)
    if nodes is not None:
        changes["acceptances"] = (0.5,) * nodes
    return StepCandidate(session_id, **values | changes)


def decide(
    candidates: Sequence[StepCandidate],
    now: float = NOW,
    budget: StepBudget = BUDGET,
    allocation: AllocationPolicy = evenly,
) -> StepPlan | Wait:
    return schedule(candidates, now, budget, allocation, StepCost({1: 0.01}))


def allocated(*candidates: StepCandidate, now: float = NOW, budget: StepBudget = BUDGET) -> tuple[RowAllocation, ...]:
    decision = decide(candidates, now, budget)
    assert isinstance(decision, StepPlan)
    return decision.allocations


def test_a_session_without_nodes_waits_until_they_are_expected_then_for_its_draft_wait_and_no_longer() -> None:
    assert decide([candidate()]) == Wait(NOW + 0.002)
    assert decide([candidate()], NOW + 0.004) == Wait(NOW + 0.010)
    assert allocated(candidate(), now=NOW + 0.010) == (RowAllocation("s", 1, 0),)


def test_nobody_waits_for_an_idle_or_distant_device() -> None:
    assert allocated(candidate(idle=True)) == (RowAllocation("s", 1, 0),)
    assert allocated(candidate(rtt_s=0.011)) == (RowAllocation("s", 1, 0),)
    assert allocated(candidate(draft_wait_s=0.0, rtt_s=0.0)) == (RowAllocation("s", 1, 0),)


def test_a_wait_has_to_bring_twice_what_stepping_brings_in_the_same_time() -> None:
    # A plain step takes 10 ms: 0.4 tokens in 2 ms, of which waiting has to bring more than the double.
    assert decide([candidate(gain=0.45)]) == Wait(NOW + 0.002)
    assert allocated(candidate(gain=0.35)) == (RowAllocation("s", 1, 0),)


def test_a_wait_has_to_pay_for_the_time_of_the_nodes_that_it_brings() -> None:
    # Four sessions commit 4 tokens in 14 ms. Waiting 2 ms brings 2.4, and steps would commit 0.6 meanwhile.
    four = [candidate(f"s{i}", gain=0.6, device_nodes=1.5) for i in range(4)]
    flat, steep = StepCost({1: 0.014}), StepCost({4: 0.014, 16: 0.038})
    assert schedule(four, NOW, BUDGET, evenly, flat) == Wait(NOW + 0.002)
    # Their six nodes take 12 ms more, in which steps without nodes commit 3.4 tokens.
    assert isinstance(schedule(four, NOW, BUDGET, evenly, steep), StepPlan)


def test_each_prompt_takes_the_stated_share_of_the_others_time_on_average_and_none_of_their_nodes() -> None:
    cost = StepCost({1: 0.010, 1001: 1.010})
    budget = StepBudget(rows=400)

    def shares(prompts: int) -> tuple[list[int], float]:
        """Return the rows of prompts in each of 400 steps, and the mean of what they take of a plain step's time."""
        found, seconds = [], budget.prompt_s
        able = [candidate(f"prompt {i}", pending=10_000) for i in range(prompts)]
        for _ in range(400):
            decision = schedule(
                [*able, candidate("busy", nodes=9)], NOW, replace(budget, prompt_s=seconds), by_acceptance, cost
            )
            assert isinstance(decision, StepPlan)
            seconds = decision.prompt_s
            assert sum(own.nodes for own in decision.allocations) == 9
            found.append(sum(own.chain for own in decision.allocations) - 1)
        return found, sum(found) * 0.001 / (len(found) * 0.010)

    for prompts in (0, 1, 3):
        rows, share = shares(prompts)
        assert share == pytest.approx(PROMPT_SHARE * prompts, rel=0.15)
        assert all(one == 0 or one >= CHUNK for one in rows)
    assert rows[0] == int(PROMPT_BURST_S / 0.001)


def test_plain_rows_come_before_nodes_and_the_budget_holds() -> None:
    budget = StepBudget(rows=10)
    shared = allocated(*(candidate(f"s{i}", nodes=6) for i in range(4)), budget=budget)
    assert [own.chain for own in shared] == [1, 1, 1, 1]
    assert sum(own.chain + own.nodes for own in shared) == 10


def test_who_stepped_longest_ago_comes_first_when_not_all_fit() -> None:
    budget = StepBudget(rows=2)
    three = [candidate(name, idle=True, skipped=steps) for name, steps in (("a", 0), ("b", 2), ("c", 1))]
    assert [own.session_id for own in allocated(*three, budget=budget)] == ["b", "c"]


def test_a_crowd_that_generates_does_not_starve_a_prompt() -> None:
    crowd = [candidate(f"s{i}", idle=True) for i in range(100)]
    shared = allocated(candidate("prompt", pending=40), *crowd)
    assert RowAllocation("prompt", 16, 0) in shared
    assert sum(own.chain + own.nodes for own in shared) == 64
