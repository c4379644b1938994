"""Test that counts kept as arrays give the same bits as the plain definition of the penalties."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core.processors import TokenCounts, penalise
from outrider.core.sampling import SamplingParams

VOCABULARY = 40
TOKENS = st.lists(st.integers(0, VOCABULARY + 5), max_size=120)
PENALTIES = st.builds(
    SamplingParams,
    repetition_penalty=st.floats(0.01, 100.0),
    presence_penalty=st.floats(-100.0, 100.0),
    frequency_penalty=st.floats(-100.0, 100.0),
)


def plainly(logits: np.ndarray, params: SamplingParams, tokens: list[int]) -> np.ndarray:
    """Apply the penalties by their definition, a token at a time."""
    out = logits.copy()
    for token, times in Counter(tokens).items():
        if token < len(out):
            value = logits[token]
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
            out[token] = value - params.presence_penalty - params.frequency_penalty * np.float64(times)
    return out


@settings(max_examples=150)
@given(
    params=PENALTIES,
    parts=st.lists(TOKENS, max_size=4),
    path=st.lists(st.integers(0, VOCABULARY + 5), max_size=6),
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from([np.float64, np.float32]),
)
def test_penalties_have_the_bits_of_their_plain_definition(
    params: SamplingParams, parts: list[list[int]], path: list[int], seed: int, dtype: type
) -> None:
    logits = np.random.default_rng(seed).normal(0.0, 5.0, VOCABULARY).astype(dtype)
    counts = TokenCounts()
    for part in parts:  # as a session does: prompt first, then commit by commit
        counts.add(part)
    tokens = [token for part in parts for token in part]
    assert np.array_equal(penalise(logits, params, counts, path), plainly(logits, params, tokens + path))
    assert np.array_equal(penalise(logits, params, counts), plainly(logits, params, tokens))  # the path left no trace
