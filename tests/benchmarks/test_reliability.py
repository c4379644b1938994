"""Test the measure of calibration on predictions that are calibrated and on others that are not."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.support.reliability import reliability


def drawn(chances: np.ndarray, seed: int = 1) -> list[bool]:
    return [bool(came) for came in np.random.default_rng(seed).random(len(chances)) < chances]


def test_predictions_that_come_true_as_often_as_they_say_have_little_error_and_some_skill() -> None:
    chances = np.linspace(0.02, 0.98, 20_000)
    found = reliability(chances.tolist(), drawn(chances))
    assert found.error < 0.02
    assert found.skill == pytest.approx(0.31, abs=0.03)  # 1 - E[p(1-p)] / (1/4) for p spread evenly


def test_predictions_that_promise_too_much_have_the_error_that_they_promise_too_much_by() -> None:
    chances = np.linspace(0.0, 0.8, 20_000)
    found = reliability((chances + 0.2).tolist(), drawn(chances))
    assert found.error == pytest.approx(0.2, abs=0.02)


def test_the_base_rate_alone_is_calibrated_and_has_no_skill() -> None:
    happened = [True, False, False, False] * 100
    found = reliability([0.25] * 400, happened, bins=4)
    assert found.error == pytest.approx(0.0, abs=1e-9)
    assert found.skill == pytest.approx(0.0, abs=1e-9)


def test_bins_hold_equally_many_predictions_in_rising_order() -> None:
    found = reliability([0.9, 0.1, 0.1, 0.9, 0.1, 0.1], [True, False, False, True, False, True], bins=3)
    assert found.curve == ((0.1, 0.0, 2), (0.1, 0.5, 2), (0.9, 1.0, 2))


def test_what_always_happens_leaves_no_skill_to_show() -> None:
    assert reliability([0.9, 1.0], [True, True], bins=1).skill == 0.0


@pytest.mark.parametrize(
    ("predicted", "happened", "bins"), [([0.5], [True, False], 1), ([0.5], [True], 2), ([], [], 1)]
)
def test_what_cannot_be_binned_is_refused(predicted: list[float], happened: list[bool], bins: int) -> None:
    with pytest.raises(ValueError, match="predictions"):
        reliability(predicted, happened, bins)
