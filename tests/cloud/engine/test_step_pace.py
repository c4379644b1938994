"""A paced target: the same logits, later."""

from __future__ import annotations

import time

import pytest

from cloud_verifier.engine.step_pace import StepPace


def test_a_pass_takes_as_long_as_its_rows_ask_for() -> None:
    pace = StepPace(20.0, 1.0)
    begun = time.perf_counter()
    with pace.hold(30):
        pass
    assert 0.05 <= time.perf_counter() - begun < 0.2
    assert pace.overran == 0.0


def test_a_pass_that_took_longer_by_itself_is_counted_and_not_held_up() -> None:
    pace = StepPace(1.0, 0.0)
    for seconds in (0.02, 0.0, 0.0, 0.0):
        with pace.hold(1):
            time.sleep(seconds)
    assert pace.overran == pytest.approx(0.25)
    pace.begin()
    with pace.hold(1):
        pass
    assert pace.overran == 0.0


def test_a_pass_that_reads_a_prompt_is_paced_but_not_judged() -> None:
    pace = StepPace(20.0, 0.0)
    for seconds in (0.0, 0.03):
        begun = time.perf_counter()
        with pace.hold(1, reads=True):
            time.sleep(seconds)
        assert time.perf_counter() - begun >= 0.02
    assert pace.overran == 0.0
