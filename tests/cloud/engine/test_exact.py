"""With exact attention a token's logits have the same bits however they were computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from rig import Drafter, Rig, client, guesses, nothing, prompt_of
from tiny_targets import MIXTURES, TINY

from benchmarks.compositions import compose, decode, differing_bits
from cloud_verifier.engine.attention import AttentionPlan
from cloud_verifier.engine.batch import PackedBatch
from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.model import TargetModel
from cloud_verifier.engine.sampling import Sampler
from cloud_verifier.engine.selftest import FLOAT32_BOUND, self_test
from outrider.core.counts import TokenCounts
from outrider.core.errors import ModelRefused
from outrider.core.processors import SamplingParams

Directory = Callable[[str], Path]
LENGTHS = (100, 20)
"""Tokens of the sessions; the first goes beyond a block of keys."""
COMPOSITIONS = 3


def rows_that_differ(model: TargetModel) -> tuple[int, int]:
    """(rows whose logits have other bits than in one-token decode, rows compared)."""
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, model.vocab_size, length).tolist() for length in LENGTHS]
    expected = [decode(model, tokens) for tokens in sequences]
    differing = compared = 0
    for _ in range(COMPOSITIONS):
        for row in compose(model, sequences, rng):
            compared += 1
            differing += differing_bits(row.logits, expected[row.sequence][row.position]) > 0
    return differing, compared


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral"])
def test_bits_do_not_depend_on_what_is_computed_beside(kind: str, dtype: str, tiny_directory: Directory) -> None:
    model = TargetModel.load(tiny_directory(kind), dtype=dtype, attention="exact")
    differing, compared = rows_that_differ(model)
    assert compared >= COMPOSITIONS * sum(LENGTHS)
    assert differing == 0


def test_with_sdpa_in_bfloat16_they_do(tiny_directory: Directory) -> None:
    model = TargetModel.load(tiny_directory("llama"), dtype="bfloat16")
    differing, _ = rows_that_differ(model)
    assert differing > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma2", "gpt2"])
def test_exact_logits_are_those_of_plain_sequences(kind: str, dtype: str, tiny_directory: Directory) -> None:
    model = TargetModel.load(tiny_directory(kind), dtype=dtype, attention="exact")
    assert self_test(model) < (FLOAT32_BOUND / 10 if dtype == "float32" else 0.5)


@pytest.mark.parametrize("attention", ["exact", "sdpa"])
def test_in_bfloat16_trees_neighbours_and_cached_prefixes_change_no_bit_that_is_sampled_from(
    attention: str, tiny_directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TargetModel.load(tiny_directory("llama"), dtype="bfloat16", attention=attention)
    self_test(model)
    choose = Sampler.choose

    def sampled(draft: Drafter, *, together: bool, cache: bool) -> list[torch.Tensor]:
        """The logits of every token of four sessions that begin alike."""
        rows: dict[tuple[int, int], torch.Tensor] = {}

        def record(sampler: Sampler, row: torch.Tensor, position: int, counts: TokenCounts, path: Sequence[int]) -> int:
            rows[sampler.key, position] = row.clone()
            return choose(sampler, row, position, counts, path)

        monkeypatch.setattr(Sampler, "choose", record)
        rig = Rig(model, EngineConfig(kv_slots=1024, token_budget=40, prefill_chunk=11, prefix_cache=cache))
        for end in range(4):
            hot = SamplingParams(temperature=1.0, seed=3)
            rig.attach(f"s{end}", client([*prompt_of(70), end], draft, 40, sampling=hot, ignore_eos=True))
            if not together or end == 0:
                rig.run()
        rig.run()
        assert (rig.engine.stats().prefix_hits > 0) == cache
        assert len(rows) == 4 * 40
        return [rows[key] for key in sorted(rows)]

    alone = sampled(nothing, together=False, cache=False)
    beside = sampled(guesses, together=True, cache=True)
    same = all(torch.equal(one, other) for one, other in zip(alone, beside, strict=True))
    assert same == (attention == "exact")


def test_the_backend_names_its_numerics(tiny_directory: Directory) -> None:
    model = TargetModel.load(tiny_directory("qwen3"), attention="exact")
    assert model.backend in ("exact", "exact+onednn")


def test_an_unknown_attention_is_refused(tiny_directory: Directory) -> None:
    with pytest.raises(ModelRefused, match="attention is fast, must be one of sdpa, exact"):
        TargetModel.load(tiny_directory("llama"), attention="fast")


@pytest.mark.parametrize("kind", [*TINY])
def test_a_mixture_of_experts_is_refused_and_nothing_else(kind: str, tiny_directory: Directory) -> None:
    if kind in MIXTURES:
        with pytest.raises(ModelRefused, match=r"exact attention: it is a mixture of experts .* use sdpa"):
            TargetModel.load(tiny_directory(kind), attention="exact")
    else:
        TargetModel.load(tiny_directory(kind), attention="exact")


def test_more_than_one_thread_is_refused(tiny_directory: Directory) -> None:
    with pytest.raises(ModelRefused, match="threads is 2, must be 1 with attention exact"):
        TargetModel.load(tiny_directory("llama"), attention="exact", threads=2)


def test_a_model_that_does_not_keep_its_bits_is_refused(
    tiny_directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TargetModel.load(tiny_directory("llama"), attention="exact")
    forward = model.forward

    def minds_its_neighbours(batch: PackedBatch, plan: AttentionPlan) -> torch.Tensor:
        return forward(batch, plan) * (1 + 1e-6 * batch.input_ids.shape[1])

    monkeypatch.setattr(model, "forward", minds_its_neighbours)
    with pytest.raises(ModelRefused, match="cannot be served with exact attention in float32"):
        self_test(model)
