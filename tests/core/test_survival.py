"""Accept probabilities: a sensible prior, unlearned by what is observed."""

from __future__ import annotations

import numpy as np
import pytest

from outrider.core.survival import MARGIN_EDGES, Calibrator


def test_the_prior_grows_with_the_lead_of_the_first_guess_and_falls_with_the_lag_of_the_others() -> None:
    calibrator = Calibrator()
    first = [calibrator.probability(0, margin) for margin in (0.0, *MARGIN_EDGES, 50.0)]
    second = [calibrator.probability(1, margin) for margin in (0.0, *MARGIN_EDGES, 50.0)]
    assert first == sorted(first) and first[0] >= 0.4 and first[-1] <= 0.97
    assert second == sorted(second, reverse=True)
    assert calibrator.probability(1, 1.0) > calibrator.probability(2, 1.0) > calibrator.probability(3, 1.0)


def test_siblings_never_promise_more_than_certainty() -> None:
    calibrator = Calibrator()
    for margin in (0.0, *MARGIN_EDGES, 50.0):
        assert sum(calibrator.probability(rank, margin) for rank in range(4)) <= 1.0 + 1e-9


def test_the_sign_of_a_margin_does_not_matter() -> None:
    calibrator = Calibrator()
    assert calibrator.probability(1, -2.0) == calibrator.probability(1, 2.0)


def test_ranks_beyond_the_last_share_its_row() -> None:
    calibrator = Calibrator()
    calibrator.observe(9, 0.3, True)
    assert calibrator.probability(3, 0.3) == calibrator.probability(9, 0.3) > Calibrator().probability(3, 0.3)


@pytest.mark.parametrize("truth", [0.05, 0.5, 0.99])
def test_observations_outweigh_the_prior(truth: float) -> None:
    rng = np.random.default_rng(1)
    calibrator = Calibrator()
    for accepted in rng.random(300) < truth:
        calibrator.observe(0, 1.2, bool(accepted))
    assert calibrator.probability(0, 1.2) == pytest.approx(truth, abs=0.06)
    assert calibrator.observations == 300


def test_one_bucket_learns_nothing_about_another() -> None:
    calibrator = Calibrator()
    before = calibrator.probability(0, 5.0)
    for _ in range(50):
        calibrator.observe(0, 0.1, False)
    assert calibrator.probability(0, 5.0) == before


def test_old_luck_fades() -> None:
    calibrator = Calibrator()
    for _ in range(2000):
        calibrator.observe(0, 1.2, True)
    for _ in range(400):
        calibrator.observe(0, 1.2, False)
    assert calibrator.probability(0, 1.2) < 0.5


def test_predictions_are_calibrated_on_a_draft_that_means_its_margins() -> None:
    """Reliability: in ten bins of equal mass, what was predicted is what happened."""
    rng = np.random.default_rng(3)
    calibrator = Calibrator()
    predicted, happened = [], []
    for i in range(6000):
        margin = float(rng.exponential(1.5))
        accepted = bool(rng.random() < 0.3 + 0.6 * (1 - np.exp(-margin)))
        if i > 2000:
            predicted.append(calibrator.probability(0, margin))
            happened.append(accepted)
        calibrator.observe(0, margin, accepted)
    order = np.argsort(predicted)
    bins = np.array_split(order, 10)
    error = np.mean([abs(np.mean(np.take(predicted, b)) - np.mean(np.take(happened, b))) for b in bins])
    assert error < 0.05
