"""Test the processors against transformers' own where they agree, and against their definition elsewhere."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from filtered import filtered_log_probs
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from outrider.core.errors import BadRequest
from outrider.core.processors import TokenCounts, log_softmax, penalise
from outrider.core.sampling import SamplingParams

VOCABULARY = 64


def random_logits(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(0.0, 3.0, VOCABULARY)


def theirs(logits: np.ndarray, *processors, prompt: tuple[int, ...] = (0,)) -> np.ndarray:
    """Return log p after transformers' processors."""
    ids = torch.tensor([prompt], dtype=torch.long)
    scores = LogitsProcessorList(processors)(ids, torch.from_numpy(logits.copy())[None])
    return torch.log_softmax(scores[0], -1).numpy()


def ours(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    return log_softmax(filtered_log_probs(logits, params))


def assert_same(mine: np.ndarray, other: np.ndarray) -> None:
    assert np.array_equal(np.isfinite(mine), np.isfinite(other))
    kept = np.isfinite(mine)
    assert np.abs(mine[kept] - other[kept]).max() < 1e-12


def probabilities(*p: float) -> np.ndarray:
    return np.log(np.array(p))


def kept(logits: np.ndarray, **params: float) -> list[int]:
    return np.flatnonzero(
        np.isfinite(filtered_log_probs(logits, SamplingParams(**{"temperature": 1.0, **params})))
    ).tolist()


# --------------------------------------------------------------------------- against transformers


ALONE = [
    *((SamplingParams(temperature=t), TemperatureLogitsWarper(t)) for t in (0.01, 0.5, 2.5)),
    *((SamplingParams(temperature=1.0, top_k=k), TopKLogitsWarper(k)) for k in (1, 10, VOCABULARY, VOCABULARY + 1)),
    *((SamplingParams(temperature=1.0, top_p=p), TopPLogitsWarper(p)) for p in (0.01, 0.3, 0.9, 0.999, 1.0)),
    *((SamplingParams(temperature=1.0, min_p=p), MinPLogitsWarper(p)) for p in (0.001, 0.1, 0.9)),
]


@pytest.mark.parametrize(("params", "processor"), ALONE)
def test_each_filter_agrees_with_transformers(params: SamplingParams, processor: LogitsProcessor) -> None:
    for seed in range(20):
        logits = random_logits(seed)
        assert_same(ours(logits, params), theirs(logits, processor))


def test_all_together_agree_with_transformers_in_the_stated_order() -> None:
    params = SamplingParams(temperature=0.7, top_k=20, top_p=0.85, min_p=0.05, repetition_penalty=1.2)
    chain = [
        RepetitionPenaltyLogitsProcessor(1.2),
        TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(20),
        TopPLogitsWarper(0.85),
        MinPLogitsWarper(0.05),
    ]
    for seed in range(50):
        logits, prompt = random_logits(seed), (1, 2, 3, 2)
        assert_same(ours(penalise(logits, params, TokenCounts(prompt)), params), theirs(logits, *chain, prompt=prompt))


def test_top_p_keeps_nothing_beyond_what_reaches_it_exactly() -> None:
    logits = probabilities(0.5, 0.25, 0.25)
    assert kept(logits, top_p=0.5) == [0]
    assert kept(logits, top_p=0.75) == [0, 1]
    assert kept(logits, top_p=0.7500001) == [0, 1, 2]


# --------------------------------------------------------------------------- bounds

OUTSIDE = [
    ("temperature", -0.1),
    ("temperature", 1e-4),
    ("temperature", float("nan")),
    ("top_k", -1),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("min_p", -0.1),
    ("repetition_penalty", 0.0),
    ("presence_penalty", -101.0),
    ("frequency_penalty", float("-inf")),
    ("seed", -1),
    ("seed", 2**64),
]


@pytest.mark.parametrize(("field", "value"), OUTSIDE)
def test_a_value_outside_its_bound_is_refused_by_field_value_and_bound(field: str, value: float) -> None:
    with pytest.raises(BadRequest, match=rf"^{field} is {value}, must be ") as caught:
        SamplingParams(**{field: value})
    assert caught.value.field == field
