"""Test that probabilities of acceptance begin with a sensible prior, which observations outweigh."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from reliability import Reliability, reliability

from outrider.core.acceptance.calibrator import MARGIN_EDGES, Calibrator
from outrider.wire.v1.coordinator_pb2 import Prior


def test_the_prior_grows_with_the_lead_of_the_first_proposal_and_falls_with_the_lag_of_the_others() -> None:
    calibrator = Calibrator()
    first = [calibrator.probability(0, margin, 1) for margin in (0.0, *MARGIN_EDGES, 50.0)]
    second = [calibrator.probability(1, margin, 1) for margin in (0.0, *MARGIN_EDGES, 50.0)]
    assert first == sorted(first) and first[0] >= 0.4 and first[-1] <= 0.97
    assert second == sorted(second, reverse=True)
    assert calibrator.probability(1, 1.0, 1) > calibrator.probability(2, 1.0, 1) > calibrator.probability(3, 1.0, 1)


def test_siblings_never_promise_more_than_certainty() -> None:
    calibrator = Calibrator()
    for margin in (0.0, *MARGIN_EDGES, 50.0):
        assert sum(calibrator.probability(rank, margin, 1) for rank in range(4)) <= 1.0 + 1e-9


@pytest.mark.parametrize("truth", [0.05, 0.5, 0.99])
def test_observations_outweigh_the_prior(truth: float) -> None:
    rng = np.random.default_rng(1)
    calibrator = Calibrator()
    for accepted in rng.random(300) < truth:
        calibrator.observe(0, 1.2, 1, bool(accepted))
    assert calibrator.probability(0, 1.2, 1) == pytest.approx(truth, abs=0.06)
    assert calibrator.observations == 300


# --- what was measured elsewhere


def mean_first(calibrator: Calibrator) -> float:
    """Return the mean probability of a first proposal, at margins about as a draft has them."""
    margins = np.random.default_rng(5).exponential(2.5, 4000)
    return float(np.mean([calibrator.probability(0, margin, 1) for margin in margins]))


@pytest.mark.parametrize("first", [0.3, 0.6, 0.9])
def test_a_measurement_from_elsewhere_is_what_first_proposals_are_expected_to_do(first: float) -> None:
    calibrator = Calibrator()
    calibrator.start_from(Prior(first_acceptance=first, sibling_acceptance=0.4, observations=256))
    assert mean_first(calibrator) == pytest.approx(first, abs=0.1)
    assert calibrator.probability(0, 4.0, 1) > calibrator.probability(0, 0.2, 1)
    caught = sum(calibrator.probability(rank, 1.0, 1) for rank in (1, 2, 3))
    assert caught == pytest.approx(0.4 * (1 - calibrator.probability(0, 1.0, 1)), rel=0.2)


# --- reliability: what was predicted when a path was drafted is what happened to it


def drafts(seed: int, rounds: int = 6000) -> Iterator[tuple[list[tuple[int, float, int]], list[bool]]]:
    """Yield chains of proposals, (rank, margin, depth) each, with the outcome of each proposal under the one before.

    How good the draft is depends on all three, and drifts as the text does.
    """
    rng = np.random.default_rng(seed)
    for number in range(rounds):
        worse = 0.1 * (1 - math.cos(2 * math.pi * number / rounds))  # 0, up to 0.2, and back
        chain, right = [], []
        for depth in range(1, 7):
            rank, margin = int(rng.random() < 0.05), float(rng.exponential(1.8))
            first = 0.97 - 0.1 * math.exp(-margin) - worse - (0.6 if depth > 3 else 0.0)
            chain.append((rank, margin, depth))
            right.append(bool(rng.random() < (first if rank == 0 else 0.4 * (1 - first))))
        yield chain, right


def paths(calibrator: Calibrator, seed: int = 3) -> Reliability:
    """Return the reliability of path acceptance as estimated when a node was drafted; the first sixth only teaches."""
    predicted, happened = [], []
    for number, (chain, right) in enumerate(drafts(seed)):
        acceptance, alive = 1.0, True
        for (rank, margin, depth), came in zip(chain, right, strict=True):
            acceptance *= calibrator.probability(rank, margin, depth)
            if number >= 1000:
                predicted.append(acceptance)
                happened.append(alive and came)
            alive = alive and came
        for (rank, margin, depth), came in zip(chain, right, strict=True):
            calibrator.observe(rank, margin, depth, came)
            if not came:
                break  # what stood below it was never under the right predecessor
    return reliability(predicted, happened)


def test_predicted_path_acceptance_is_what_happens_with_a_draft_that_drifts() -> None:
    found = paths(Calibrator())
    assert found.error < 0.05
    assert found.skill > 0.4
