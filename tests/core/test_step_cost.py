"""Test that the cost of a step is interpolated between measured points and refined by later steps."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.step_cost import KNOTS, StepCost


def test_measured_points_are_met_and_lines_lie_between_and_beyond_them() -> None:
    cost = StepCost({1: 0.010, 8: 0.010, 16: 0.018})
    assert cost.seconds(1, 1) == pytest.approx(0.010)
    assert cost.seconds(12, 1) == pytest.approx(0.014)
    assert cost.seconds(16, 1) == pytest.approx(0.018)
    assert cost.seconds(116, 1) == pytest.approx(0.118)
    assert cost.seconds(4096, 1) == pytest.approx(4.098)


def test_steps_teach_another_curve_and_the_share_of_a_session() -> None:
    rng = random.Random(0)
    cost = StepCost({1: 0.020, 16: 0.030, 128: 0.100})

    def true(rows: int, sessions: int) -> float:
        return 0.010 + 0.0004 * rows + 0.0003 * sessions

    for _ in range(4000):
        sessions = rng.choice([1, 2, 4, 8, 16])
        rows = sessions * rng.randint(1, 9)
        cost.observe(rows, sessions, true(rows, sessions) * rng.uniform(0.95, 1.05))
    for rows, sessions in ((1, 1), (6, 1), (8, 4), (16, 16), (64, 16), (100, 16)):
        assert cost.seconds(rows, sessions) == pytest.approx(true(rows, sessions), rel=0.08)


def test_steps_that_take_several_times_as_long_are_soon_believed_however_much_was_seen_before() -> None:
    cost = StepCost({8: 0.007})
    for _ in range(1000):
        cost.observe(32, 1, 0.007)
    for _ in range(15):
        cost.observe(32, 1, 0.028)
    assert cost.seconds(32, 1) == pytest.approx(0.028, rel=0.05)
    assert cost.seconds(8, 1) == pytest.approx(0.007, rel=0.05)


@settings(max_examples=60)
@given(
    steps=st.lists(
        st.tuples(st.integers(1, 3000), st.integers(1, 64), st.floats(1e-6, 10.0, allow_nan=False)), max_size=60
    )
)
def test_whatever_it_hears_more_rows_and_sessions_never_cost_less(steps: list[tuple[int, int, float]]) -> None:
    cost = StepCost({1: 0.010, 16: 0.020}, share_s=0.001)
    for step in steps:
        cost.observe(*step)
    curve = cost.curve(np.arange(1, 3000), 3)
    assert np.all(curve > 0.0)
    assert np.all(np.diff(curve) >= -1e-12)
    assert cost.seconds(64, 32) >= cost.seconds(64, 2)
    assert list(cost.table()) == list(KNOTS)


def test_one_slow_first_step_of_a_size_hardly_raises_its_price() -> None:
    measured = {1: 0.028, 2: 0.029, 4: 0.029, 6: 0.031, 8: 0.034, 12: 0.040}
    cost = StepCost(measured)
    cost.observe(7, 1, 0.090)
    assert cost.seconds(8, 1) < 1.15 * measured[8]


def test_sizes_that_were_profiled_on_a_busy_machine_are_tried_again_and_found_cheap() -> None:
    true = StepCost({1: 0.028, 4: 0.030, 8: 0.034, 16: 0.044, 64: 0.110})
    cost = StepCost({1: 0.028, 4: 0.036, 6: 0.074, 16: 0.075, 64: 0.200})
    sizes = np.arange(1, 33)
    tokens = 1.0 + np.cumsum(0.2 * 0.9**sizes)  # what a step yields by its rows

    def best(price: StepCost) -> int:
        return int(sizes[np.argmax(tokens / price.curve(sizes, 1))])

    assert best(cost) <= 4 < best(true) - 3
    for _ in range(4000):
        rows = best(cost)
        cost.observe(rows, 1, true.seconds(rows, 1))

    def rate(rows: int) -> float:
        return float(tokens[rows - 1]) / true.seconds(rows, 1)

    assert rate(best(cost)) > 0.97 * rate(best(true))


def test_values_of_prompt_sized_steps_stay_as_they_were_measured() -> None:
    measured = {1: 0.028, 64: 0.11, 512: 0.8, 2048: 3.1}
    cost = StepCost(measured)
    for _ in range(10_000):
        cost.observe(2, 1, cost.seconds(2, 1))
    assert cost.seconds(512, 1) == pytest.approx(measured[512], rel=0.01)
