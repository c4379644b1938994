"""Test that with exact attention a token's logits have the same bits however they were computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from rig import Drafter, Rig, client, nothing, prompt_of, random_tree
from tiny_targets import MIXTURES, TINY, WIDE, make_tiny

from benchmarks.support.batch_invariance import compose, crowd, decode, differing_bits
from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.sampling import Sampler
from cloud_verifier.engine.torch_backend import model as target_model
from cloud_verifier.engine.torch_backend.batch import PackedBatch
from cloud_verifier.engine.torch_backend.kernels import linear as kernels
from cloud_verifier.engine.torch_backend.kernels.attention import AttentionPlan
from cloud_verifier.engine.torch_backend.kernels.exact_attention import ExactBackend
from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine.torch_backend.numerics_check import FLOAT32_BOUND, check_numerics
from outrider.core.errors import ModelRefused
from outrider.core.sampling import SamplingParams

Directory = Callable[[str], Path]
LENGTHS = (100, 20)
"""Tokens of the sessions; the first goes beyond a block of keys."""
COMPOSITIONS = 3
CROWDS = (33, 40, 64, 128, 512)
"""Rows of the steps that are full of chains; oneDNN's bfloat16 kernels with AMX change from 33 on."""


def rows_that_differ(model: TargetModel) -> tuple[int, int]:
    """Return (rows whose logits have other bits than in one-token decode, rows compared)."""
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, model.vocab_size, length).tolist() for length in LENGTHS]
    expected = [decode(model, tokens) for tokens in sequences]
    differing = compared = 0
    for _ in range(COMPOSITIONS):
        for row in compose(model, sequences, rng):
            compared += 1
            differing += differing_bits(row.logits, expected[row.sequence][row.position]) > 0
    return differing, compared


def crowds_that_differ(model: TargetModel) -> dict[int, int]:
    """Return, by rows of the step, how many rows have logits with other bits than in one-token decode."""
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, model.vocab_size, length).tolist() for length in LENGTHS]
    expected = [decode(model, tokens) for tokens in sequences]
    return {
        rows: sum(
            differing_bits(row.logits, expected[row.sequence][row.position]) > 0
            for row in crowd(model, sequences, rows)
        )
        for rows in CROWDS
    }


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
def test_bits_of_a_wide_model_do_not_depend_on_how_many_rows_a_step_has(dtype: str, tiny_directory: Directory) -> None:
    model = TargetModel.load(tiny_directory(WIDE), dtype=dtype, attention="exact")
    assert crowds_that_differ(model) == dict.fromkeys(CROWDS, 0)


@pytest.fixture
def kernels_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act as oneDNN with AMX, on any processor: from 33 rows on a product has other bits."""
    if kernels._linear is None:
        pytest.skip("this torch has no packed linear")

    def product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *rest: object) -> torch.Tensor:
        out = torch.nn.functional.linear(rows.float(), weight.float(), bias).to(rows.dtype)
        return out * 1.01 if rows.shape[0] > 32 else out

    monkeypatch.setattr(kernels, "_pack", lambda weight, rows: weight)  # some processors pack no bfloat16
    monkeypatch.setattr(kernels, "_linear", product)


@pytest.mark.usefixtures("kernels_by_rows")
def test_nor_where_the_linear_kernel_changes_with_the_rows(tiny_directory: Directory) -> None:
    model = TargetModel.load(tiny_directory("llama"), dtype="bfloat16", attention="exact")
    assert crowds_that_differ(model) == dict.fromkeys(CROWDS, 0)
    check_numerics(model)


@pytest.mark.usefixtures("kernels_by_rows")
def test_a_model_whose_layers_stay_whole_is_refused_where_the_linear_kernel_changes_with_the_rows(
    tiny_directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target_model, "tile_linears", lambda *parts: 0)
    model = TargetModel.load(tiny_directory("llama"), dtype="bfloat16", attention="exact")
    with pytest.raises(ModelRefused, match="in a step of 40 rows"):
        check_numerics(model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma2", "gpt2"])
def test_exact_logits_are_those_of_plain_sequences(kind: str, dtype: str, tiny_directory: Directory) -> None:
    model = TargetModel.load(tiny_directory(kind), dtype=dtype, attention="exact")
    assert check_numerics(model) < (FLOAT32_BOUND / 10 if dtype == "float32" else 0.5)


@pytest.mark.parametrize("attention", ["exact", "sdpa"])
def test_in_bfloat16_trees_neighbours_and_cached_prefixes_change_no_bit_that_is_sampled_from(
    attention: str, tiny_directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TargetModel.load(tiny_directory("llama"), dtype="bfloat16", attention=attention)
    check_numerics(model)
    choose = Sampler.choose

    def sampled(draft: Drafter, *, together: bool, cache: bool) -> list[torch.Tensor]:
        """Return the logits of every token of four sessions that begin alike."""
        rows: dict[tuple[int, int], torch.Tensor] = {}

        def record(sampler: Sampler, row: torch.Tensor, position: int, path: Sequence[int], *_: object) -> int:
            rows[sampler.key, position] = row.clone()
            return choose(sampler, row, position, path)

        monkeypatch.setattr(Sampler, "choose", record)
        rig = Rig(model, EngineConfig(kv_slots=1024, token_budget=40, prefill_chunk=11, prefix_cache=cache))
        for end in range(4):
            hot = SamplingParams(temperature=1.0, seed=3)
            rig.attach(f"s{end}", client([*prompt_of(70), end], draft, 40, sampling=hot, ignore_eos=True))
            if not together or end == 0:
                rig.run()
        rig.run()
        assert (rig.engine.counters.prefix_hits > 0) == cache
        assert len(rows) == 4 * 40
        return [rows[key] for key in sorted(rows)]

    alone = sampled(nothing, together=False, cache=False)
    beside = sampled(random_tree, together=True, cache=True)
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
        with pytest.raises(ModelRefused, match=r"exact attention: it is a mixture of experts, .* use --attention sdpa"):
            TargetModel.load(tiny_directory(kind), attention="exact")
    else:
        TargetModel.load(tiny_directory(kind), attention="exact")


def test_more_than_one_thread_is_refused(tiny_directory: Directory) -> None:
    with pytest.raises(ModelRefused, match="threads is 2, must be 1 with attention exact"):
        TargetModel.load(tiny_directory("llama"), attention="exact", threads=2)


@pytest.mark.parametrize("beyond", [1, 20, 128, 300])
def test_a_model_that_does_not_keep_its_bits_is_refused(
    beyond: int, tiny_directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = TargetModel.load(tiny_directory("llama"), attention="exact")
    forward = model.forward

    def minds_its_neighbours(batch: PackedBatch, plan: AttentionPlan) -> torch.Tensor:
        return forward(batch, plan) * (1 + 1e-6 * (batch.input_ids.shape[1] > beyond))

    monkeypatch.setattr(model, "forward", minds_its_neighbours)
    if beyond == 300:
        check_numerics(model, rows=300)
    with pytest.raises(
        ModelRefused, match=r"cannot be served with exact attention: .* \(in a step of \d+ rows, in float32 on "
    ):
        check_numerics(model, rows=512)


def test_it_is_refused_on_a_gpu_whatever_its_check_would_find(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TargetModel, "hardware", "a GPU")
    model = TargetModel(make_tiny("llama"), name="tiny", backend=ExactBackend())
    model.device = torch.device("cuda")
    with pytest.raises(ModelRefused, match="with exact attention: on a GPU a token's bits depend"):
        check_numerics(model)
