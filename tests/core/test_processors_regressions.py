"""Test defects that were found while the verifier's engine was built."""

from __future__ import annotations

import numpy as np
import pytest
from filtered import filtered_log_probs

from outrider.core.processors import log_softmax, mass_before
from outrider.core.sampling import SamplingParams


def plain_top_p(logits: np.ndarray, top_p: float) -> np.ndarray:
    """Apply top-p by its definition, with a sort of the whole vocabulary."""
    log_p = log_softmax(logits)
    order = np.argsort(-log_p, kind="stable")
    p = np.exp(log_p[order])
    before = np.concatenate(([0.0], np.cumsum(p)[:-1]))
    log_p[order[before >= top_p]] = -np.inf
    return log_p


def test_mass_before_is_the_running_sum_itself_and_no_difference_of_rounded_sums() -> None:
    for seed in range(50):
        p = np.random.default_rng(seed).dirichlet(np.full(300, 0.1))
        before, total = [], 0.0
        for value in p:
            before.append(total)
            total += value
        assert mass_before(p).tolist() == before


@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0, 12.0])
@pytest.mark.parametrize("top_p", [1e-6, 0.5, 0.95, 1.0 - 1e-12])
def test_top_p_that_sorts_only_the_head_has_the_bits_of_one_that_sorts_everything(spread: float, top_p: float) -> None:
    rng = np.random.default_rng(7)
    for _ in range(20):
        logits = np.round(rng.normal(size=997) * spread, 1)  # rounding makes ties
        result = filtered_log_probs(logits, SamplingParams(temperature=1.0, top_p=top_p))
        np.testing.assert_array_equal(result, plain_top_p(logits, top_p))
