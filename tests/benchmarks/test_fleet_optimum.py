"""Test that the fleet's optimum is exact where it can be counted by hand, and never below any whole choice."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys

import numpy as np
import pytest
from scipy.optimize import linprog

from benchmarks.support.fleet_simulation.optimum import (
    ENDLESS,
    AcceptanceProcess,
    OptimalVerifier,
    SessionTruth,
    StaticRequest,
    divided,
    per_step,
)
from benchmarks.support.fleet_simulation.world import SimulatedText
from coordinator.records import Window
from coordinator.window.streaming import LinkTiming, replay

RIGHT = AcceptanceProcess(1.0, 1.0, flip=0.04, caught=0.0)
WRONG = AcceptanceProcess(0.0, 0.0, flip=0.04, caught=0.0)
CODE = AcceptanceProcess(0.92, 0.70, flip=0.04, caught=0.4)
PROSE = AcceptanceProcess(0.60, 0.30, flip=0.04, caught=0.4)


def _speed(
    process: AcceptanceProcess, k: int, rtt: float = 0.0, draft: float = 0.0, depth: int = ENDLESS
) -> tuple[float, float]:
    """Return (tokens, levels) of steps that take 1 s."""
    one = SessionTruth(process, rtt, draft, nodes_per_level=1.0)
    tokens, levels = per_step([one], np.array([k]), np.array([depth]), np.ones(1))
    return float(tokens[0]), float(levels[0])


def _verifier(*sessions: SessionTruth, row_s: float = 0.001) -> OptimalVerifier:
    """Return a verifier of 30 ms a step, with expensive nodes, so that the choice is hard."""
    return OptimalVerifier(sessions, lambda nodes: 0.030 + row_s * nodes)


THREE = (
    SessionTruth(CODE, 0.010, 0.003, 1.6),
    SessionTruth(PROSE, 0.030, 0.006, 1.6),
    SessionTruth(PROSE, 0.150, 0.010, 1.6),
)


@pytest.mark.parametrize("k", [1, 3, 5, 7])
def test_when_every_draft_token_is_accepted_and_there_at_once_a_step_brings_k_and_one_of_the_targets_own(
    k: int,
) -> None:
    assert _speed(RIGHT, k) == pytest.approx((k + 1.0, k))


def test_when_every_draft_token_is_rejected_a_step_brings_one_token_and_still_holds_k_levels() -> None:
    assert _speed(WRONG, 4) == pytest.approx((1.0, 4.0))


def test_a_right_sibling_brings_one_token_and_ends_the_way_down() -> None:
    assert _speed(AcceptanceProcess(0.0, 0.0, flip=0.04, caught=1.0), 4) == pytest.approx((2.0, 4.0))


def test_streaming_is_one_token_a_step_without_nodes() -> None:
    assert _speed(CODE, 0) == pytest.approx((1.0, 0.0))


def test_a_device_slower_than_the_target_adds_nothing() -> None:
    assert _speed(RIGHT, 4, draft=1.5) == pytest.approx((1.0, 0.0))


def test_independent_acceptances_give_the_geometric_sum() -> None:
    process = AcceptanceProcess(0.6, 0.6, flip=0.5, caught=0.0)
    assert _speed(process, 3)[0] == pytest.approx(1.0 + 0.6 + 0.6**2 + 0.6**3, rel=1e-6)


@pytest.mark.parametrize("kind, process", [("code", CODE), ("prose", PROSE)])
@pytest.mark.parametrize(
    "rtt, draft, k, depth", [(0.3, 0.02, 8, 12), (1.5, 0.1, 6, 10), (1.0, 0.7, 4, 7), (2.3, 0.1, 16, 6)]
)
def test_a_long_text_played_by_the_streaming_model_goes_as_fast(
    kind: str, process: AcceptanceProcess, rtt: float, draft: float, k: int, depth: int
) -> None:
    played = replay(
        SimulatedText(kind, random.Random(7)).take(30_000), LinkTiming(rtt, draft, lambda nodes: 1.0), Window(k, depth)
    )
    assert _speed(process, k, rtt, draft, depth)[0] == pytest.approx(played.tokens_per_step, rel=0.03)


def test_it_shares_nothing_with_the_controller() -> None:
    optimum = "benchmarks.support.fleet_simulation.optimum"
    program = f"import sys, {optimum}; print([m for m in sys.modules if m.startswith('coordinator')])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("seed", range(6))
def test_the_program_finds_what_trying_all_divisions_finds(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = np.column_stack([np.ones(3), 1.0 + rng.random((3, 1)), 1.5 + rng.random((3, 1))])
    nodes = np.column_stack([np.zeros(3), 1.0 + rng.random((3, 1)), 3.0 + rng.random((3, 1))])
    total, least = 5.0, 1.1
    shares = [np.array([1.0 - (a + b) / 10, a / 10, b / 10]) for a in range(11) for b in range(11 - a)]
    each = [[(share @ tokens[i], share @ nodes[i]) for share in shares] for i in range(3)]
    fair = [[one for one in mine if one[0] >= least] for mine in each]
    tried = max(sum(t for t, _ in ways) for ways in itertools.product(*fair) if sum(n for _, n in ways) <= total)
    found = divided(tokens, nodes, total, least)
    assert found is not None
    assert found.min() >= least - 1e-5
    assert tried - 1e-5 <= found.sum() <= tried + 0.1


@pytest.mark.parametrize("seed", range(20))
def test_nodes_are_divided_as_a_solver_of_linear_programs_divides_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count, windows = int(rng.choice((2, 7, 30))), 6
    nodes = np.column_stack([np.zeros(count), rng.random((count, windows - 1)) * 12.0])
    tokens = np.column_stack([np.ones(count), 1.0 + rng.random((count, windows - 1)) * 2.0])
    total, least = rng.random() * count * 4.0, float(rng.choice((0.0, 1.1, 1.6)))
    one_each, each = np.kron(np.eye(count), np.ones(windows)), np.kron(np.eye(count), np.ones(windows)) * tokens.ravel()
    solved = linprog(
        -tokens.ravel(),
        A_ub=np.vstack([nodes.ravel(), -each]),
        b_ub=np.append(total, np.full(count, -least)),
        A_eq=one_each,
        b_eq=np.ones(count),
    )
    found = divided(tokens, nodes, total, least)
    assert (found is not None) == solved.success
    if found is not None:
        assert found.sum() == pytest.approx(-solved.fun, abs=1e-6)
        assert found.min() >= least - 1e-6


def test_where_the_nodes_do_not_suffice_for_everybody_nothing_is_fair() -> None:
    tokens, nodes = np.array([[1.0, 2.0]] * 3), np.array([[0.0, 4.0]] * 3)
    assert divided(tokens, nodes, 5.9, least=1.5) is None
    assert divided(tokens, nodes, 6.1, least=1.5) is not None
    assert divided(tokens, nodes, 99.0, least=2.1) is None


@pytest.mark.parametrize("tolerance", [0.02, 1.0])
@pytest.mark.parametrize("row_s", [0.0001, 0.001, 0.004])
def test_no_whole_choice_of_windows_brings_more(tolerance: float, row_s: float) -> None:
    verifier = _verifier(*THREE, row_s=row_s)
    best = verifier.best(tolerance)
    whole = [verifier.outcome([StaticRequest(k) for k in ks]) for ks in itertools.product((0, 2, 8), repeat=3)]
    fair = [one for one in whole if min(one.over_streaming(verifier.plain_s)) >= 1.0 - tolerance]
    assert best.goodput >= 0.998 * max(one.goodput for one in fair)
    assert min(best.over_streaming(verifier.plain_s)) >= 1.0 - tolerance - 1e-4
    assert best.goodput >= 3.0 / verifier.plain_s


def test_whoever_drafts_well_pays_for_nobody_else_and_that_costs_goodput() -> None:
    verifier = _verifier(*THREE)
    assert verifier.best(1.0).goodput > 1.02 * verifier.best(0.0).goodput


def test_a_step_lasts_as_long_as_what_arrives_in_it() -> None:
    verifier = _verifier(*THREE)
    asked = [StaticRequest(4), StaticRequest(2), StaticRequest(1, depth=3)]
    step_s = verifier.outcome(asked).step_s
    _, nodes = per_step(THREE, np.array([4, 2, 1]), np.array([ENDLESS, ENDLESS, 3]), np.full(3, step_s))
    assert step_s == pytest.approx(0.030 + 0.001 * nodes.sum(), rel=1e-3)
