"""Test that the target's token in a large vocabulary is the one that the reference chooses, whatever the logits."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.core import target_token
from outrider.core.coupling import position_key
from outrider.core.errors import InternalError
from outrider.core.sampling import SamplingParams
from outrider.core.target_token import certain_tokens, reference_token, sampled_token

Row = NDArray[np.float32]

VOCABULARY = 151_936


def hot(temperature: float = 0.8, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> SamplingParams:
    return SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def bfloat16(row: Row) -> Row:
    """Cut the mantissa to bfloat16's, so that many logits are equal."""
    return (row.view(np.int32) & -65536).view(np.float32)


def flat(seed: int) -> Row:
    return np.random.default_rng(seed).standard_normal(VOCABULARY).astype(np.float32)


def peaked(seed: int) -> Row:
    row = 2.5 * flat(seed)
    row[np.random.default_rng(seed).integers(0, VOCABULARY, 40)] += np.linspace(4, 13, 40, dtype=np.float32)
    return row


def masked(seed: int) -> Row:
    """Return logits of which all but 40 are -inf, as under a grammar."""
    row = np.full(VOCABULARY, -np.inf, dtype=np.float32)
    row[np.random.default_rng(seed).integers(0, VOCABULARY, 40)] = flat(seed)[:40]
    return row


ROWS: dict[str, Callable[[int], Row]] = {
    "flat": flat,
    "peaked": peaked,
    "flat in bfloat16": lambda seed: bfloat16(flat(seed)),
    "peaked in bfloat16": lambda seed: bfloat16(peaked(seed)),
    "masked": masked,
    "two values": lambda seed: np.sign(flat(seed)),
    "far from zero": lambda seed: flat(seed) + np.float32(5e4),
    "one far ahead": lambda seed: np.where(np.arange(VOCABULARY) == 99, np.float32(80.0), flat(seed)),
}
PARAMS = [
    hot(),
    hot(temperature=0.01),
    hot(temperature=3.0),
    hot(top_p=0.95),
    hot(top_p=0.3),
    hot(temperature=1.5, top_p=0.999),
    hot(top_k=1),
    hot(top_k=50),
    hot(top_k=50, top_p=0.95),
    hot(top_k=2_000, top_p=0.6, min_p=0.01),
    hot(top_k=120_000, top_p=0.9),
    hot(min_p=0.05),
    hot(temperature=2.0, min_p=1e-6),
    hot(top_p=0.9, min_p=0.02),
]


@pytest.mark.parametrize("params", PARAMS, ids=lambda p: f"T{p.temperature} k{p.top_k} p{p.top_p} m{p.min_p}")
@pytest.mark.parametrize("kind", ROWS)
def test_large_vocabularies_give_the_token_of_the_reference(kind: str, params: SamplingParams) -> None:
    row = ROWS[kind](3)
    for position in range(4):
        at = position_key(17, position)
        assert sampled_token(row, params, at) == reference_token(row, params, at)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [hot(), hot(top_k=50), hot(top_p=0.95), hot(min_p=0.1)])
def test_a_logit_that_is_no_number_is_an_error_in_a_large_vocabulary(bad: float, params: SamplingParams) -> None:
    row = flat(1)
    row[150_000] = bad
    with np.errstate(invalid="ignore"), pytest.raises(InternalError, match="not finite"):
        sampled_token(row, params, 5)


@pytest.fixture(scope="module")
def short_reach() -> Iterator[None]:
    """Look at few tokens one by one, so that others matter in a vocabulary of a few dozen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target_token, "_REACHES", (0.5, 2.0, 20.0))
        patch.setattr(target_token, "_OPEN_REACH", 0.5)
        patch.setattr(target_token, "_ENTRIES", 64)
        yield


few_values = st.sampled_from([-np.inf, -3.0, -1.0, -1e-12, 0.0, 1e-30, 0.5, 0.5 + 2**-24, 1.0, 2.0, 8.0])
rows = st.one_of(
    st.lists(st.floats(-12, 12, width=32), min_size=1, max_size=60),
    st.lists(few_values, min_size=1, max_size=60),
    st.lists(st.floats(width=32), min_size=1, max_size=20),
)
shares = st.one_of(st.just(1.0), st.sampled_from([0.25, 0.5, 0.75, 0.9]), st.floats(1e-6, 1.0))
params_of_requests = st.builds(
    SamplingParams,
    temperature=st.one_of(st.sampled_from([0.001, 0.5, 0.8, 1.0]), st.floats(0.001, 20.0)),
    top_k=st.integers(0, 70),
    top_p=shares,
    min_p=st.one_of(st.just(0.0), st.floats(0.0, 1.0)),
)


def outcome(choose: Callable[[], int | None]) -> int | str | None:
    try:
        return choose()
    except InternalError:
        return "not finite"


@settings(max_examples=600)
@example(many=[([0.0, 1e-30, 1e-30, 1e-30, 1e-30], hot(top_k=1))], at=0, doubles=False)
@given(
    many=st.lists(st.tuples(rows, params_of_requests), min_size=1, max_size=6),
    at=st.integers(0, 2**64 - 1),
    doubles=st.booleans(),
)
def test_tokens_that_are_certain_are_those_of_the_reference(
    short_reach: None, many: list[tuple[list[float], SamplingParams]], at: int, doubles: bool
) -> None:
    logits = [np.array(row, dtype=np.float64 if doubles else np.float32) for row, _ in many]
    params, keys = [one for _, one in many], [position_key(at, position) for position in range(len(many))]
    with np.errstate(all="ignore"):
        expected = [
            outcome(lambda: reference_token(row, one, key))  # noqa: B023
            for row, one, key in zip(logits, params, keys, strict=True)
        ]
        found = certain_tokens(logits, params, keys)
    assert [token for token, right in zip(found, expected, strict=True) if token not in (None, right)] == []


def test_rows_of_a_language_model_are_certain_without_the_reference() -> None:
    logits = [peaked(seed) for seed in range(len(PARAMS))]
    keys = [position_key(17, position) for position in range(len(PARAMS))]
    found = certain_tokens(logits, PARAMS, keys)
    assert found.count(None) <= 1  # 120,000 tokens of equal standing
    assert [certain_tokens([row], [one], [at])[0] for row, one, at in zip(logits, PARAMS, keys, strict=True)] == found
