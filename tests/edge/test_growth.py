"""Test that growth evaluates, sends and waits for the nodes that pay for it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edge_agent.drafting.growth import (
    DecodeLatency,
    RankedNode,
    SpeculationPlan,
    choose_children,
    choose_leaves,
    departure_time,
    least_acceptance,
    should_wait,
)
from outrider.core.protocol.messages import FIRST_DIRECTIVE, LEAST_ACCEPTANCE, Directive, SessionLimits
from outrider.core.tree import ROOT, Node

PLAN = SpeculationPlan(nodes=48, depth=16, nodes_per_step=10, min_acceptance=0.05, draft_wait_s=0.008, step_s=0.007)
FLAT = DecodeLatency(((1, 1.0e-3), (2, 1.02e-3), (4, 1.05e-3), (8, 1.1e-3)))
STEEP = DecodeLatency(((1, 1.0e-3), (2, 2.0e-3), (4, 4.0e-3), (8, 8.0e-3)))


def leaf(number: int, path_acceptance: float, depth: int, *, spine: bool) -> RankedNode:
    return RankedNode(Node(number, ROOT, token=0, position=depth - 1), depth, path_acceptance, spine)


def leaves(*path_acceptances: float, spine: int = 0) -> list[RankedNode]:
    return [leaf(i + 1, acceptance, depth=1 + i, spine=i == spine) for i, acceptance in enumerate(path_acceptances)]


def test_a_plan_never_exceeds_the_sessions_limits() -> None:
    directive = Directive(window_nodes=48, window_depth=16, min_acceptance=0.2, draft_wait_ms=8, step_ms=7.0)
    plan = SpeculationPlan.of(directive, SessionLimits(nodes=5, depth=40))
    assert (plan.nodes, plan.depth, plan.min_acceptance, plan.draft_wait_s, plan.step_s) == (5, 16, 0.2, 0.008, 0.007)
    assert SpeculationPlan.of(directive, SessionLimits(), waits=False).draft_wait_s == 0.0


def test_where_rows_cost_nothing_a_node_still_needs_the_least_acceptance() -> None:
    assert SpeculationPlan.of(Directive(min_acceptance=0.001), SessionLimits()).min_acceptance == LEAST_ACCEPTANCE


@pytest.mark.parametrize(("children", "siblings"), [(0, 3), (1, 1), (8, 3)])
def test_a_device_proposes_no_more_children_than_the_target_evaluates(children: int, siblings: int) -> None:
    assert SpeculationPlan.of(FIRST_DIRECTIVE, SessionLimits(children=children)).siblings == siblings


def test_the_greedy_spine_goes_along_even_where_others_are_better() -> None:
    chosen = choose_leaves(leaves(0.8, 0.1, spine=1), {ROOT}, PLAN, STEEP, 0.05)
    assert {item.node.id for item in chosen} == {1, 2}


def test_children_are_the_most_probable_ones_above_min_acceptance() -> None:
    guesses = {1: (0.5, True), 2: (0.2, False), 3: (0.06, False), 4: (0.055, False)}
    assert choose_children(guesses, leaf(1, 1.0, 2, spine=True), PLAN) == [1, 2, 3]
    assert choose_children(guesses, leaf(1, 1.0, 2, spine=True), replace(PLAN, min_acceptance=0.1)) == [1, 2]
    assert choose_children(guesses, leaf(1, 0.5, 2, spine=True), PLAN) == [1, 2]
    assert choose_children(guesses, leaf(1, 1.0, 16, spine=True), PLAN) == []


def test_the_first_guess_is_offered_near_the_root_even_if_it_is_not_believed() -> None:
    guesses = {5: (0.3, False), 1: (0.01, True)}
    assert choose_children(guesses, leaf(1, 1.0, 0, spine=True), PLAN) == [5, 1]
    assert choose_children(guesses, leaf(1, 1.0, 2, spine=True), PLAN) == [5]
    assert choose_children(guesses, leaf(1, 1.0, 0, spine=False), PLAN) == [5]


def test_device_time_raises_the_floor_only_as_far_as_it_delays_the_verifier() -> None:
    assert least_acceptance(PLAN, FLAT, tokens_per_step=3.0) == PLAN.min_acceptance
    slow = DecodeLatency(((1, 20e-3),))
    assert least_acceptance(PLAN, slow, tokens_per_step=1.0) == pytest.approx(20e-3 / 7e-3 / 2)


def test_waiting_ends_when_the_next_node_gains_less_than_going_now() -> None:
    decode = 0.7e-3
    assert should_wait(PLAN, [], 0.5, decode, 0.0)
    assert should_wait(PLAN, [0.9], 0.8, decode, 1e-3)
    assert not should_wait(PLAN, [0.9, 0.8, 0.7], 0.3, decode, 2e-3)


def test_a_device_holds_nodes_no_longer_than_the_draft_wait_and_for_no_more_than_a_step_takes() -> None:
    assert not should_wait(PLAN, [], 0.9, 6e-3, 0.0)
    assert not should_wait(replace(PLAN, draft_wait_s=0.0), [], 0.9, 1e-4, 0.0)
    assert not should_wait(replace(PLAN, nodes_per_step=2), [0.9, 0.9], 0.9, 1e-4, 0.0)
    assert not should_wait(PLAN, [0.9], 0.0, 1e-4, 0.0)


def test_nodes_that_nobody_waits_for_arrive_at_most_a_quarter_of_a_step_before_the_next_step() -> None:
    plan = replace(PLAN, step_s=0.020)
    assert departure_time(plan, 0.001, 10.0, 10.0) == pytest.approx(10.014)
    for rtt_s in (0.001, 0.005, 0.014, 0.019, 0.050, 0.305):
        arrives = departure_time(plan, rtt_s, 10.0, 10.0) + rtt_s / 2
        begins = 10.0 - rtt_s / 2  # of the step that is under way; others follow one another
        assert 0.0 < plan.step_s - (arrives - begins) % plan.step_s <= 0.005 + 1e-9


def run(*path_acceptances: float) -> list[RankedNode]:
    """Return a chain of nodes below the root, none of which is evaluated."""
    return [RankedNode(Node(i, i - 1, token=0, position=i - 1), i, p) for i, p in enumerate(path_acceptances, start=1)]


def test_nodes_of_a_cheap_source_are_evaluated_in_one_decode_where_width_costs_little() -> None:
    assert choose_leaves(run(0.8, 0.6, 0.5), {ROOT}, PLAN, FLAT, 0.05) == run(0.8, 0.6, 0.5)
    assert choose_leaves(run(0.8, 0.6, 0.5), {ROOT}, PLAN, STEEP, 0.05) == run(0.8)


def test_a_node_brings_the_nodes_above_it_and_pays_for_them() -> None:
    above, below = run(0.9, 0.9)
    known = replace(above, settled=True)  # its only child is known
    assert choose_leaves([known, below], {ROOT}, PLAN, FLAT, 0.05) == [known, below]
    other = leaf(3, 0.8, depth=1, spine=False)
    rates = DecodeLatency(((1, 1.0e-3), (2, 2.0e-3), (4, 8.0e-3), (8, 16.0e-3)))
    assert choose_leaves([known, below, other], {ROOT}, PLAN, rates, 0.05) == [known, below]
    assert choose_leaves([known, other], {ROOT}, PLAN, FLAT, 0.05) == [other]


def test_a_node_that_is_new_in_a_decode_has_one_child_in_it() -> None:
    above, below = run(0.9, 0.8)
    sibling = RankedNode(Node(3, 1, token=1, position=1), 2, 0.7)
    assert choose_leaves([above, below, sibling], {ROOT}, PLAN, FLAT, 0.05) == [above, below]
    assert choose_leaves([below, sibling], {ROOT, 1}, PLAN, FLAT, 0.05) == [below, sibling]
