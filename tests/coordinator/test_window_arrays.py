"""Test that windows which are predicted and chosen as arrays are those that are found one by one."""

from __future__ import annotations

import math
import random
import time
from dataclasses import replace

import numpy as np
import pytest
import straightforward_windows as straightforward
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coordinator.records import Window, WindowBounds
from coordinator.window import controller, report_adapter
from coordinator.window.controller import TOLERANCE, WIDEST, SessionView, VerifierView
from coordinator.window.replay_tables import CHUNK, LONGEST, RunTables, replay_all
from outrider.core.acceptance.history import HIT, MISS, SIBLING
from outrider.core.step_cost import StepCost
from outrider.core.telemetry import SessionTelemetry

COSTS = (
    StepCost({1: 0.030, 65: 0.0332}),
    StepCost({1: 0.030, 65: 0.0332, 129: 0.060, 257: 0.120}),
    StepCost({1: 0.0115, 17: 0.022, 65: 0.060, 257: 0.220}, 0.0004),
)
TIMES = st.one_of(st.just(0.0), st.integers(-40, 24).map(lambda n: 2.0 ** (n / 8)))
"""Times in steps; products of eighths of an octave are what the controller asks for."""
RUNS = st.lists(st.tuples(st.sampled_from((MISS, SIBLING, HIT)), st.integers(1, 40)), min_size=1, max_size=30)
HISTORIES = st.one_of(
    st.binary(min_size=1, max_size=LONGEST).map(lambda drawn: bytes(byte % 3 for byte in drawn)),
    RUNS.map(lambda runs: b"".join(bytes([outcome]) * count for outcome, count in runs)[:LONGEST]),
)


@settings(max_examples=150, deadline=None)
@given(
    histories=st.lists(HISTORIES, min_size=1, max_size=4),
    times=st.tuples(TIMES, TIMES),
    windows=st.lists(st.tuples(st.integers(0, 16), st.integers(0, 32)), min_size=1, max_size=4),
    wait=st.sampled_from((0.0, 0.1, 0.4, 1.0)),
    gain=st.sampled_from((0.0, 0.3, 0.7, 1.5, 2.0)),
)
def test_all_histories_are_replayed_at_once_as_each_is_by_itself(
    histories: list[bytes], times: tuple[float, float], windows: list[tuple[int, int]], wait: float, gain: float
) -> None:
    k, depth = np.array(windows).T
    lengths, steps, levels = replay_all(histories, *times, k, depth, wait, gain)
    for i, history in enumerate(histories):
        for j, (one_k, one_depth) in enumerate(windows):
            speed = straightforward.replayed(history, *times, one_k, one_depth, wait, gain)
            assert (steps[i, j], levels[i, j]) == (speed.steps, speed.nodes)
            assert lengths[i, j] == pytest.approx(speed.seconds, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    sessions=st.lists(
        st.tuples(HISTORIES, TIMES, TIMES, st.integers(0, 12), st.integers(16, 32)), min_size=1, max_size=8
    )
)
def test_histories_that_are_walked_in_tables_are_as_fast_as_replayed(
    sessions: list[tuple[bytes, float, float, int, int]],
) -> None:
    histories, rtt, draft, ahead, deepest = zip(*sessions, strict=True)
    steps, levels = RunTables(controller.K, 2 * CHUNK).per_window(
        histories, np.array(rtt), np.array(draft), np.array(ahead), np.array(deepest)
    )
    for i, (history, one_rtt, one_draft, levels_ahead, deep) in enumerate(sessions):
        for j, k in enumerate(controller.K):
            speed = straightforward.replayed(history, one_rtt, one_draft, k, min(k + levels_ahead, deep))
            assert (steps[i, j], levels[i, j]) == (speed.steps, speed.nodes)


def test_tables_are_bounded_and_those_that_were_used_last_are_kept() -> None:
    tables = RunTables((1, 2), 2 * CHUNK)
    histories = [bytes([HIT, HIT, MISS, SIBLING] * 4)] * (3 * CHUNK)
    rtt, ones = np.linspace(0.1, 4.0, 3 * CHUNK), np.ones(3 * CHUNK, dtype=np.int64)
    found = tables.per_window(histories, rtt, 0.1 * ones, ones, 8 * ones)
    for row in (0, CHUNK, 3 * CHUNK - 1):
        at = slice(row, row + 1)
        again = tables.per_window(histories[at], rtt[at], 0.1 * ones[at], ones[at], 8 * ones[at])
        assert [each[0].tolist() for each in again] == [each[row].tolist() for each in found]
    assert len(tables._places) == 2 * CHUNK == len(set(tables._places.values()))
    assert next(reversed(tables._places))[0] == rtt[-1]


SESSIONS = st.builds(
    lambda history, rtt_ms, draft_ms, per_level, gain, bounds, fixed, current: SessionView(
        SessionTelemetry(
            "",
            rtt_ms=rtt_ms,
            acceptance_history=history,
            draft_ms=draft_ms,
            nodes_per_level=per_level,
            server_gain=gain,
        ),
        current,
        bounds,
        fixed,
    ),
    history=st.one_of(HISTORIES, HISTORIES, st.just(b""), HISTORIES.map(lambda history: history * 2)),
    rtt_ms=st.sampled_from((0.0, 1.0, 7.0, 20.0, 55.0, 150.0, 400.0)),
    draft_ms=st.sampled_from((0.0, 1.5, 3.0, 3.0, 8.0, math.inf)),
    per_level=st.sampled_from((1.0, 1.6, 2.5)),
    gain=st.sampled_from((0.0, 0.0, 0.0, 0.4, 1.23)),
    bounds=st.one_of(
        st.just(WIDEST),
        st.just(WIDEST),
        st.builds(
            lambda k, depth, wait_ms, pinned: WindowBounds(Window(k, max(k, depth), wait_ms, 1.5), pinned),
            st.sampled_from((0, 2, 5, 16)),
            st.sampled_from((0, 4, 20)),
            st.sampled_from((None, 3.0)),
            st.booleans(),
        ),
    ),
    fixed=st.sampled_from((None, None, None, None, (1.4, 3.0))),
    current=st.one_of(
        st.none(),
        st.builds(
            lambda k, wait_ms: Window(k, k + 4, wait_ms),
            st.sampled_from((0, *controller.K)),
            st.sampled_from((0.0, 5.0)),
        ),
    ),
)


@settings(max_examples=120, deadline=None)
@example(  # drafting and streaming bring the same
    sessions=[SessionView(SessionTelemetry("", acceptance_history=b"\2\2\2\2", rtt_ms=150.0), Window(1, 5, 0.0))],
    cost=COSTS[0],
    tolerance=TOLERANCE,
    step_now_s=0.0,
)
@given(
    sessions=st.lists(SESSIONS, min_size=1, max_size=7),
    cost=st.sampled_from(COSTS),
    tolerance=st.sampled_from((TOLERANCE, 1.0)),
    step_now_s=st.sampled_from((0.0, 0.035)),
)
def test_decisions_are_those_of_trying_everything_one_by_one(
    sessions: list[SessionView], cost: StepCost, tolerance: float, step_now_s: float
) -> None:
    named = [replace(one, telemetry=replace(one.telemetry, session_id=f"s{i}")) for i, one in enumerate(sessions)]
    view = VerifierView(cost, tuple(named), 0.001, step_now_s)
    decided = list(controller.decide(view, tolerance).values())
    expected, step_s = straightforward.decide(view, tolerance)
    plain_s = float(view.step_s(0))
    goodputs = sum(one.speedup for one in decided), sum(option.tokens * plain_s / step_s for option in expected)
    assert goodputs[0] == pytest.approx(goodputs[1], rel=1e-9)
    for decision, option in zip(decided, expected, strict=True):
        assert (decision.window.k, decision.window.depth) == (option.window.k, option.window.depth)
        assert decision.window.draft_wait_ms == pytest.approx(option.window.draft_wait_ms, abs=1e-9)
        assert decision.speedup == pytest.approx(option.tokens * plain_s / step_s, rel=1e-9)


def crowd(count: int, seed: int) -> list[SessionView]:
    """Return sessions of one verifier that differ in distance, device and text."""
    rng, found = random.Random(seed), []
    for i in range(count):
        right = rng.uniform(0.2, 0.95)
        telemetry = SessionTelemetry(
            f"s{i}",
            rtt_ms=45.0 * rng.lognormvariate(0.0, 0.8),
            acceptance_history=bytes(
                rng.choices((HIT, SIBLING, MISS), (right, 0.4 - 0.4 * right, 0.6 - 0.6 * right), k=160)
            ),
            draft_ms=4.0 * rng.lognormvariate(0.0, 0.7),
            nodes_per_level=1.6,
        )
        found.append(SessionView(telemetry, Window(rng.choice((0, 2, 6)), 8, 0.0) if rng.random() < 0.5 else None))
    return found


@pytest.mark.parametrize(("cost", "tolerance"), [(COSTS[1], TOLERANCE), (COSTS[2], 1.0)])
def test_a_crowd_gets_the_windows_that_are_found_one_by_one(cost: StepCost, tolerance: float) -> None:
    view = VerifierView(cost, tuple(crowd(16, 7)))
    decided, (expected, _) = controller.decide(view, tolerance), straightforward.decide(view, tolerance)
    assert [one.window.k for one in decided.values()] == [option.window.k for option in expected]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(HISTORIES, max_size=3).map(b"".join), max_size=6))
def test_histories_are_cut_together_as_each_is_by_itself(histories: list[bytes]) -> None:
    assert report_adapter.latest(histories) == [straightforward.latest(history) for history in histories]


def test_a_decision_for_a_hundred_sessions_takes_a_fraction_of_a_millisecond_each() -> None:
    """With the tables there, as they are for a verifier's second report; replaying every history took 2 to 5 ms."""
    took = []
    for seed in range(6):
        view = VerifierView(COSTS[1], tuple(crowd(100, 0) if seed == 0 else crowd(100, seed % 2)))
        begun = time.process_time()
        controller.decide(view)
        took.append(time.process_time() - begun)
    assert min(took) < 0.1
