"""With exact attention a token's logits have the same bits however they were computed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from benchmarks.compositions import compose, decode, differing_bits
from cloud_verifier.engine.model import TargetModel
from cloud_verifier.engine.selftest import FLOAT32_BOUND, self_test
from outrider.core.errors import ModelRefused

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


def test_the_backend_names_its_numerics(tiny_directory: Directory) -> None:
    model = TargetModel.load(tiny_directory("qwen3"), attention="exact")
    assert model.backend in ("exact", "exact+onednn")


def test_an_unknown_attention_is_refused(tiny_directory: Directory) -> None:
    with pytest.raises(ModelRefused, match="attention is fast, must be one of sdpa, exact"):
        TargetModel.load(tiny_directory("llama"), attention="fast")


def test_a_mixture_whose_experts_do_not_keep_the_bits_is_refused(tiny_directory: Directory) -> None:
    model = TargetModel.load(tiny_directory("gpt_oss"), attention="exact")
    with pytest.raises(ModelRefused, match="cannot be served with exact attention in float32"):
        self_test(model)
