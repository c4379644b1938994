"""Test that top-k and top-p touch few values, and keep to the bit the same tokens as a sort of everything."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.processors import log_softmax, mass_before, surviving_log_probs
from outrider.core.sampling import SamplingParams


def by_sorting_everything(logits: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Apply each filter by its definition: stable sorts of the whole vocabulary, equal values by token id."""
    log_p = log_softmax(logits / params.temperature)
    if params.top_k and params.top_k < len(log_p):
        keep = np.argsort(-log_p, kind="stable")[: params.top_k]
        kept = np.full_like(log_p, -np.inf)
        kept[keep] = log_p[keep]
        log_p = log_softmax(kept)
    least = log_p.max() + math.log(params.min_p) if params.min_p > 0.0 else -np.inf
    ids = np.flatnonzero(log_p != -np.inf)
    if params.top_p < 1.0:
        order = np.argsort(-log_p, kind="stable")
        ids = np.sort(order[~(mass_before(np.exp(log_p[order])) >= params.top_p)])
    ids = ids[~(log_p[ids] < least)]
    return ids, log_p[ids]


def assert_the_same(logits: np.ndarray, params: SamplingParams) -> None:
    with np.errstate(invalid="ignore"):  # infinities become NaN
        ids, kept = surviving_log_probs(logits, params)
        other_ids, other = by_sorting_everything(logits, params)
    np.testing.assert_array_equal(ids, other_ids)
    np.testing.assert_array_equal(kept, other)


few_values = st.sampled_from([-40.0, -3.0, -0.5, 0.0, -0.0, 0.5, 1.0, 12.0, 30.0])
"""So few values that most are equal to others, as they are in bfloat16."""
odd_values = st.one_of(few_values, st.floats(-50.0, 50.0), st.sampled_from([-np.inf, -1e300, np.nan, np.inf]))


@settings(max_examples=400)
@given(
    logits=st.one_of(st.lists(few_values, min_size=1, max_size=80), st.lists(odd_values, min_size=1, max_size=20)),
    temperature=st.sampled_from([0.01, 0.8, 1.0, 30.0]),
    top_k=st.integers(0, 90),
    top_p=st.one_of(
        st.just(1.0), st.sampled_from([1e-12, 0.25, 0.5, 0.95, 1.0 - 1e-10, 1.0 - 2**-53]), st.floats(0.01, 1.0)
    ),
    min_p=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
)
def test_what_is_kept_is_what_a_sort_of_everything_keeps(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    assert_the_same(np.array(logits), SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
