"""The best tokens of a row."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.llama import top_candidates, top_log_probs


def sorted_top(row: np.ndarray, k: int) -> list[int]:
    return sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]


@settings(max_examples=200, deadline=None)
@given(
    vocab=st.integers(1, 700), k=st.integers(1, 12), levels=st.sampled_from([1, 3, 50, 10**9]), seed=st.integers(0, 999)
)
def test_the_best_are_those_of_a_full_sort_with_ties_by_lower_id(vocab: int, k: int, levels: int, seed: int) -> None:
    rows = np.random.default_rng(seed).integers(-levels, levels, (3, vocab)).astype(np.float32)
    rows[:, ::7] = -np.inf
    ids, values = top_candidates(rows, k)
    assert ids.shape == values.shape == (3, min(k, vocab))
    for i in range(3):
        assert ids[i].tolist() == sorted_top(rows[i], k)
        np.testing.assert_array_equal(values[i], rows[i][ids[i]])


def test_one_row_gives_one_dimension() -> None:
    ids, values = top_candidates(np.array([0.5, 2.0, 1.0], dtype=np.float32), 2)
    assert ids.tolist() == [1, 2]
    assert values.tolist() == [2.0, 1.0]


@pytest.mark.parametrize("offset", [0.0, 5e4, -5e4])
def test_log_probabilities_are_over_the_whole_row(offset: float) -> None:
    rows = np.random.default_rng(0).normal(0, 4, (2, 8192)).astype(np.float32)
    exact = rows.astype(np.float64)
    exact = exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))
    ids, log_probs = top_log_probs(rows + np.float32(offset), 5)
    np.testing.assert_allclose(log_probs, np.take_along_axis(exact, ids, axis=1), atol=1e-5 + abs(offset) * 1e-6)
    assert top_log_probs(rows[0], 5)[1].shape == (5,)


def test_logits_are_not_changed() -> None:
    rows = np.random.default_rng(0).normal(size=(2, 1000)).astype(np.float32)
    kept = rows.copy()
    top_log_probs(rows, 4)
    np.testing.assert_array_equal(rows, kept)
