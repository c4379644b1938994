"""Test that chains have the tokens of the reference, whatever is chosen ahead of their walk on an accelerator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from cloud_verifier.engine.device_sampling import DeviceSampler, SessionWalk, walk_together
from cloud_verifier.engine.sampling import Sampler
from outrider.core.coupling import gumbel
from outrider.core.errors import InternalError
from outrider.core.sampling import SamplingParams, TypicalAcceptance
from outrider.core.verification import chain_of

pytest.importorskip("hypothesis")
from hypothesis import given, settings
from hypothesis import strategies as st

PROMPT = [3, 1, 4]


def race(logits: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor, slack: float) -> Any:
    """Return what `triton_race.race` returns, by numpy, in float32 as there."""
    rows = [
        _raced(*row, slack) for row in zip(logits.float().numpy(), keys.tolist(), temperatures.tolist(), strict=True)
    ]
    return np.array(rows, dtype=np.float64).T


def _raced(x: np.ndarray[Any, Any], key: int, temperature: float, slack: float) -> tuple[Any, ...]:
    with np.errstate(invalid="ignore", over="ignore"):
        scores = x * np.float32(1.0 / temperature) + gumbel(key % 2**64, np.arange(len(x))).astype(np.float32)
        token = int(scores.argmax())
        second = np.delete(scores, token).max()
        weights = np.exp((x - x.max()).astype(np.float32) / np.float32(temperature))
        first = (x > x[token]) | ((x == x[token]) & (np.arange(len(x)) < token))
        near = (x != x[token]) & (abs(x - x[token]) <= slack * temperature)
        share = float(weights[first].sum() / weights.sum())
        lead = float(scores[token] - second)
    return token, lead, float(x.max()), float(x[token]), int(first.sum()), int(near.sum()), share


class Chain(NamedTuple):
    sampler: Sampler
    position: int
    row: int
    drafts: list[int]


def verified(logits: torch.Tensor, chains: Sequence[Chain], device: DeviceSampler | None) -> list[list[int]]:
    """Return the tokens along each chain; none of one whose logits are no numbers."""
    walks = [
        SessionWalk(chain_of(one.drafts, one.position), lambda token, position: False, one.sampler, one.row)
        for one in chains
    ]
    walk_together(logits, walks, device)
    assert all(walk.error is None or isinstance(walk.error, InternalError) for walk in walks)
    return [walk.tokens if walk.error is None else [] for walk in walks]


def naive(logits: torch.Tensor, chain: Chain) -> list[int]:
    """Return the target's tokens along a chain, row by row."""
    path: list[int] = []
    try:
        while not path or chain.drafts[: len(path)] == path:
            row = logits[chain.row + len(path)]
            below = chain.drafts[len(path) : len(path) + 1]
            path.append(chain.sampler.choose(row, chain.position + len(path), path, below))
    except InternalError:
        return []
    return path


@st.composite
def samplings(draw: st.DrawFn) -> SamplingParams:
    ways: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {},
        {"top_k": draw(st.integers(1, 80))},
        {"top_p": draw(st.sampled_from([0.05, 0.5, 0.9, 0.999]))},
        {"min_p": draw(st.sampled_from([1e-6, 0.02, 0.5]))},
        {"top_k": draw(st.integers(1, 2_000)), "top_p": 0.8, "min_p": 0.01},
        {"presence_penalty": draw(st.sampled_from([-1.0, 0.5])), "logit_bias": ((2, 3.0), (5, -100.0), (10**6, 1.0))},
        {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "top_k": draw(st.integers(0, 30))},
        {"repetition_penalty": 0.8, "temperature": 0.0},
        {"frequency_penalty": 0.3, "top_p": 0.5},
    ]
    temperature = draw(st.sampled_from([0.01, 0.3, 0.8, 1.5]))
    typical = draw(st.sampled_from([None, None, TypicalAcceptance(), TypicalAcceptance(1e-4, 1e9)]))
    return SamplingParams(
        **{"temperature": temperature, "seed": draw(st.integers(0, 2**64 - 1)), "typical": typical}
        | draw(st.sampled_from(ways))
    )


@st.composite
@np.errstate(invalid="ignore", over="ignore")
def steps(draw: st.DrawFn) -> tuple[torch.Tensor, list[Chain]]:
    """Return the logits of a step, also of rows that belong to nobody, and its chains with right and wrong drafts."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    vocabulary = draw(st.sampled_from([7, 60, 900, 17_000]))
    lengths = draw(st.lists(st.integers(0, 5), min_size=1, max_size=5))
    gap = draw(st.integers(0, 2))
    rows = sum(lengths) + len(lengths) * (1 + gap)
    values = rng.normal(0.0, draw(st.sampled_from([0.0, 1.0, 5.0, 30.0])), (rows, vocabulary))
    if draw(st.booleans()):
        values = np.round(values)  # many are equal
    logits = torch.tensor(values, dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])))
    if draw(st.integers(0, 3)) == 0:
        logits[draw(st.integers(0, rows - 1)), draw(st.integers(0, vocabulary - 1))] = draw(
            st.sampled_from([float("nan"), float("inf"), float("-inf")])
        )
    chains, row = [], 0
    for length in lengths:
        params = draw(samplings())
        sampler, drafts = Sampler(params, PROMPT, [2, 2, 10**6]), list[int]()
        for _ in range(length):
            token = draw(st.sampled_from([None, 1]))
            try:
                right = sampler.choose(logits[row + len(drafts)], 2 + len(drafts), drafts)
            except InternalError:
                right = 0
            drafts.append(right if token is None else token)
        chains.append(Chain(sampler, 2, row, drafts))
        row += length + 1 + gap
    return logits, chains


@np.errstate(invalid="ignore", over="ignore")  # of logits that are no numbers
@settings(max_examples=150)
@given(steps())
def test_chains_have_the_tokens_of_the_reference(step: tuple[torch.Tensor, list[Chain]]) -> None:
    logits, chains = step
    expected = [naive(logits, chain) for chain in chains]
    assert verified(logits, chains, None) == expected
    device = DeviceSampler(race)
    assert verified(logits, chains, device) == expected
    assert device._race is race, "it has failed"


def test_rows_that_are_certain_on_the_device_are_not_chosen_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logits = torch.randn(12 * 4, 5_000) * 4.0
    ways = (
        {"temperature": 0.0, "repetition_penalty": 1.2},
        {"temperature": 0.8, "presence_penalty": 0.5},
        {"temperature": 0.8, "top_p": 0.9},
    )
    samplers = [Sampler(SamplingParams(seed=9, **ways[at % 3]), PROMPT) for at in range(12)]  # type: ignore[arg-type]
    plain = [Chain(sampler, 0, 4 * at, []) for at, sampler in enumerate(samplers)]
    chains = []
    for chain in plain:
        drafts: list[int] = []
        for at in range(3):
            drafts.append(chain.sampler.choose(logits[chain.row + at], at, drafts))
        chains.append(Chain(chain.sampler, 0, chain.row, drafts))
    chosen = []
    choose = Sampler.choose
    monkeypatch.setattr(Sampler, "choose", lambda *row: chosen.append(1) or choose(*row))
    paths = verified(logits, chains, DeviceSampler(race))
    assert [len(path) for path in paths] == [4] * 12
    assert len(chosen) <= 4


def test_kernels_that_fail_leave_all_rows_to_the_host() -> None:
    logits = torch.randn(4, 50)
    chains = [Chain(Sampler(SamplingParams(temperature=0.8, seed=at), PROMPT), 0, at, []) for at in range(4)]
    expected = [naive(logits, chain) for chain in chains]
    device = DeviceSampler(object())  # type: ignore[arg-type]
    assert verified(logits, chains, device) == expected == verified(logits, chains, device)
