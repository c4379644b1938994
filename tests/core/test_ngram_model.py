"""Test the prediction of tokens from counts of n-grams."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.core.errors import BadRequest
from outrider.core.ngram import FOLLOWERS, ORDER, NgramModel
from outrider.core.processors import TokenCounts
from outrider.core.proposals import propose, propose_among
from outrider.core.sampling import SamplingParams


def witten_bell(text: Sequence[int], context: Sequence[int]) -> dict[int, float]:
    """Return the mixture of all orders, counted anew for one context."""
    mixed: dict[int, float] = {}
    for order in range(1, min(ORDER, len(context)) + 1):
        end = list(context[len(context) - order :])
        counts = Counter(text[i] for i in range(order, len(text)) if list(text[i - order : i]) == end)
        if not counts:
            break
        weight = 1.0 / (counts.total() + len(counts))
        mixed = {token: share * len(counts) * weight for token, share in mixed.items()}
        for token, count in counts.items():
            mixed[token] = mixed.get(token, 0.0) + count * weight
    return mixed


def predicted(model: NgramModel, path: Sequence[int] = ()) -> dict[int, float]:
    ids, log_q = model.following(path)
    assert list(log_q) == sorted(log_q, reverse=True)
    return dict(zip(ids.tolist(), np.exp(log_q).tolist(), strict=True))


@given(st.lists(st.integers(0, 6), max_size=60), st.integers(0, 60), st.lists(st.integers(0, 6), max_size=8))
def test_a_text_read_at_once_or_bit_by_bit_predicts_the_mixture_of_all_orders(
    text: list[int], first: int, path: list[int]
) -> None:
    model = NgramModel()
    model.reset([9, 9])
    model.reset(text[:first])
    at_once = NgramModel()
    at_once.reset(text)
    model.extend(text[first:])
    expected = witten_bell(text, [*text, *path])
    assert predicted(at_once, path) == pytest.approx(expected)
    assert predicted(model, path) == pytest.approx(expected)


@given(st.lists(st.lists(st.integers(0, 6), max_size=30), max_size=30), st.lists(st.integers(0, 6), max_size=8))
def test_tokens_that_are_in_the_table_count_as_those_that_are_not(parts: list[list[int]], path: list[int]) -> None:
    model, text = NgramModel(), [token for part in parts for token in part]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.core.ngram._BLOCK", 5)
        patch.setattr("outrider.core.ngram._LONGEST", 40)
        for part in parts:
            model.extend(part)
    assert predicted(model, path) == pytest.approx(witten_bell(text, [*text, *path]))


def test_what_generated_tokens_take_is_bounded_and_so_is_what_is_looked_at() -> None:
    model = NgramModel()
    model.reset([1, 2, 3])
    text = [token for follower in range(16_000) for token in (7, 100 + follower)]
    tracemalloc.start()
    for first in range(0, len(text), 100):
        model.extend(text[first : first + 100])
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held / len(text) < 400
    assert max(len(followers) for followers in model._recent.values()) <= 1_024
    model.extend([7, 555, 7])
    assert len(model.following()[0]) == FOLLOWERS
    assert model.following()[0][0] == 556  # which followed 7, 555, 7


@pytest.mark.parametrize("wrong", [-1, 2**31, 2**63, 2**64])
@pytest.mark.parametrize("many", [1, 3_000])
def test_what_is_no_token_id_is_refused_and_changes_nothing(wrong: int, many: int) -> None:
    model = NgramModel()
    model.reset([1, 2, 1])
    for read in (model.reset, model.extend):
        with pytest.raises(BadRequest, match=f"token id {wrong} cannot be counted, must be 0 to 2147483647"):
            read([5] * many + [wrong])
    assert model.following()[0].tolist() == [2]
    assert model.following([5])[0].tolist() == []


# Proposals among the tokens that were found

IDS = np.array([4, 9, 2], dtype=np.int64)
LOG_Q: NDArray[np.float64] = np.log(np.array([0.5, 0.3, 0.1]))


def test_sampled_proposals_have_the_noise_that_a_model_with_these_probabilities_would_have() -> None:
    sampling = SamplingParams(temperature=1.0)
    row = np.full(10, -20.0)
    row[IDS] = LOG_Q
    for position in range(200):
        among = propose_among(IDS, LOG_Q, sampling, 77, position, 3)
        assert [p.token for p in among] == [p.token for p in propose(row, sampling, 77, position, TokenCounts(), (), 3)]
