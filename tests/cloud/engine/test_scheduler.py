"""Who steps now."""

from __future__ import annotations

from typing import Any

from cloud_verifier.engine.scheduler import Candidate, Grant, Plan, StepBudget, Wait, schedule

BUDGET = StepBudget(rows=64, prefill_rows=16)
NOW = 100.0


def candidate(session_id: str = "s", **changes: Any) -> Candidate:
    """A session without nodes that committed just now and waits up to 10 ms for a device 2 ms away."""
    values: dict[str, Any] = {
        "pending": 1,
        "nodes": 0,
        "may_step": True,
        "idle": False,
        "nodes_per_step": 8,
        "patience_s": 0.010,
        "rtt_s": 0.002,
        "last_commit": NOW,
        "last_step": 0,
    }
    return Candidate(session_id, **values | changes)


def grants(*candidates: Candidate, now: float = NOW, budget: StepBudget = BUDGET) -> tuple[Grant, ...]:
    decision = schedule(candidates, now, budget)
    assert isinstance(decision, Plan)
    return decision.grants


def test_without_sessions_there_is_nothing_to_wait_for() -> None:
    assert schedule([], NOW, BUDGET) == Wait(None)


def test_a_session_whose_device_fell_behind_neither_steps_nor_sets_a_deadline() -> None:
    assert schedule([candidate(nodes=3, may_step=False)], NOW, BUDGET) == Wait(None)


def test_a_session_with_nodes_steps_at_once() -> None:
    assert grants(candidate(nodes=5)) == (Grant("s", 1, 5),)


def test_a_session_without_nodes_waits_for_its_patience_and_no_longer() -> None:
    assert schedule([candidate()], NOW + 0.004, BUDGET) == Wait(NOW + 0.010)
    assert grants(candidate(), now=NOW + 0.010) == (Grant("s", 1, 0),)


def test_nobody_waits_for_an_idle_or_distant_or_draftless_device() -> None:
    assert grants(candidate(idle=True)) == (Grant("s", 1, 0),)
    assert grants(candidate(rtt_s=0.011)) == (Grant("s", 1, 0),)
    assert grants(candidate(nodes_per_step=0)) == (Grant("s", 1, 0),)
    assert grants(candidate(patience_s=0.0, rtt_s=0.0)) == (Grant("s", 1, 0),)


def test_the_deadline_is_that_of_the_first_who_is_due() -> None:
    later = candidate("later", patience_s=0.030)
    assert schedule([later, candidate("sooner")], NOW, BUDGET) == Wait(NOW + 0.010)


def test_who_waits_steps_along_when_another_steps() -> None:
    assert set(grants(candidate("waits"), candidate("ready", nodes=2))) == {
        Grant("waits", 1, 0),
        Grant("ready", 1, 2),
    }


def test_a_session_gets_no_more_nodes_than_its_directive_says() -> None:
    assert grants(candidate(nodes=30)) == (Grant("s", 1, 8),)


def test_plain_rows_come_before_nodes_and_the_budget_holds() -> None:
    budget = StepBudget(rows=10, prefill_rows=4)
    shared = grants(*(candidate(f"s{i}", nodes=6) for i in range(4)), budget=budget)
    assert [grant.chain for grant in shared] == [1, 1, 1, 1]
    assert sum(grant.chain + grant.nodes for grant in shared) == 10


def test_who_stepped_longest_ago_comes_first_when_not_all_fit() -> None:
    budget = StepBudget(rows=2, prefill_rows=1)
    three = [candidate(name, idle=True, last_step=step) for name, step in (("a", 3), ("b", 1), ("c", 2))]
    assert [grant.session_id for grant in grants(*three, budget=budget)] == ["b", "c"]


def test_a_lone_prompt_gets_the_whole_budget() -> None:
    assert grants(candidate(pending=200)) == (Grant("s", 64, 0),)


def test_prompts_share_their_rows_in_order_of_arrival_while_others_generate() -> None:
    shared = grants(candidate("first", pending=10), candidate("second", pending=50, nodes=5), candidate("g", nodes=4))
    assert set(shared) == {Grant("first", 10, 0), Grant("second", 6, 0), Grant("g", 1, 4)}


def test_the_end_of_a_prompt_takes_nodes_along() -> None:
    assert grants(candidate(pending=10, nodes=3)) == (Grant("s", 10, 3),)


def test_a_crowd_that_generates_does_not_starve_a_prompt() -> None:
    crowd = [candidate(f"s{i}", idle=True) for i in range(100)]
    shared = grants(candidate("prompt", pending=40), *crowd)
    assert Grant("prompt", 16, 0) in shared
    assert sum(grant.chain + grant.nodes for grant in shared) == 64
