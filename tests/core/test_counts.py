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


def plainly(logits: np.ndarray, params: SamplingParams, prompt: list[int], output: list[int]) -> np.ndarray:
    """Apply the penalties by their definition, a token at a time."""
    out, counts = logits.copy(), Counter(output)
    for token in {*prompt, *output}:
        if token < len(out):
            value = logits[token]
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
            value = np.float64(value)
            if token in counts:
                value = value - params.presence_penalty - params.frequency_penalty * counts[token]
            out[token] = value
    return out


@settings(max_examples=150)
@given(
    params=PENALTIES,
    prompt=TOKENS,
    parts=st.lists(TOKENS, max_size=4),
    path=st.lists(st.integers(0, VOCABULARY + 5), max_size=6),
    seed=st.integers(0, 2**32),
    dtype=st.sampled_from([np.float64, np.float32]),
)
def test_penalties_have_the_bits_of_their_plain_definition(
    params: SamplingParams, prompt: list[int], parts: list[list[int]], path: list[int], seed: int, dtype: type
) -> None:
    logits = np.random.default_rng(seed).normal(0.0, 5.0, VOCABULARY).astype(dtype)
    counts = TokenCounts(prompt)
    for part in parts:  # as a session does, commit by commit
        counts.add(part)
    output = [token for part in parts for token in part]
    assert np.array_equal(penalise(logits, params, counts, path), plainly(logits, params, prompt, output + path))
    # The path left no trace.
    assert np.array_equal(penalise(logits, params, counts), plainly(logits, params, prompt, output))


def test_presence_and_frequency_count_the_output_alone_and_repetition_the_prompt_too() -> None:
    logits = np.full(3, 4.0)
    both = SamplingParams(presence_penalty=1.0, frequency_penalty=0.5)
    assert penalise(logits, both, TokenCounts([0, 0, 1], [1]), [1]).tolist() == [4.0, 2.0, 4.0]
    assert penalise(logits, SamplingParams(repetition_penalty=2.0), TokenCounts([0], [1])).tolist() == [2.0, 2.0, 4.0]
