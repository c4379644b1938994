"""Test that llama.cpp computes from an exported file what transformers computes from the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from exportable import CONFIGS, logits_of, make_model, save_model, save_tokenizer
from numpy.typing import NDArray

from cloud_verifier.distill.errors import GgufError
from cloud_verifier.distill.gguf.export import PROBES, check_tokenizer, export, load_model
from cloud_verifier.distill.gguf.writer import tensor_types
from outrider.llama import LlamaModel, TreeContext

IDS = [5, 77, 130, 3, 250, 18, 18, 299, 41, 9, 160, 2]
Save = Callable[..., Path]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tokenizer(tmp_path_factory.mktemp("target"))


@pytest.fixture
def saved(tmp_path: Path) -> Save:
    return lambda kind, **changes: save_model(kind, tmp_path / kind / "model", **changes)


def llama_logits(path: Path, ids: list[int] = IDS) -> NDArray[np.float32]:
    with LlamaModel.load(path) as model, TreeContext(model, n_ctx=64, kv_type="f32") as context:
        rows, parent = [context.reset(ids[:1])], 0
        for token in ids[1:]:
            (parent,), logits = context.decode([parent], [token])
            rows.append(logits[0])
    return np.stack(rows)


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_the_file_has_the_logits_of_the_model(kind: str, saved: Save, target: Path, tmp_path: Path) -> None:
    folder = saved(kind)
    done = export(folder, target, tmp_path / "draft.gguf", "F32")
    assert np.allclose(llama_logits(done.path), logits_of(load_model(folder), IDS), atol=2e-3)
    assert done.probes == PROBES


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_eight_bits_stay_close_and_every_matrix_has_them(kind: str, saved: Save, target: Path, tmp_path: Path) -> None:
    folder = saved(kind)
    done = export(folder, target, tmp_path / "draft.gguf", "Q8_0")
    wanted, got = logits_of(load_model(folder), IDS), llama_logits(done.path)
    assert np.corrcoef(wanted.ravel(), got.ravel())[0, 1] > 0.999
    assert set(done.types) == {"Q8_0", "F32"}
    assert done.size == done.path.stat().st_size


def test_four_bits_take_the_mix_that_is_meant(saved: Save, target: Path, tmp_path: Path) -> None:
    done = export(saved("llama"), target, tmp_path / "draft.gguf", "Q4_K_M")
    assert done.types["Q4_K"] > 0
    assert set(done.types) <= {"Q4_K", "Q6_K", "F32"}
    assert np.corrcoef(logits_of(make_model("llama"), IDS).ravel(), llama_logits(done.path).ravel())[0, 1] > 0.9


def test_a_tensor_that_was_silently_widened_is_refused_unless_allowed(
    saved: Save, target: Path, tmp_path: Path
) -> None:
    folder = saved("qwen2", intermediate_size=96)
    with pytest.raises(GgufError, match=r"blk\.0\.ffn_down\.weight is Q\w+, not Q4_K or Q6_K"):
        export(folder, target, tmp_path / "draft.gguf", "Q4_K_M")
    assert list(tmp_path.glob("draft.gguf*")) == []
    export(folder, target, tmp_path / "draft.gguf", "Q4_K_M", widened=["blk.*.ffn_down.weight"])
    stored = tensor_types(tmp_path / "draft.gguf")
    assert stored["blk.0.ffn_down.weight"] not in ("Q4_K", "Q6_K") and stored["blk.0.ffn_up.weight"] == "Q4_K"


def test_a_tokenizer_that_llama_cpp_would_split_otherwise_is_refused(saved: Save, tmp_path: Path) -> None:
    strange = save_tokenizer(tmp_path / "strange", pattern=r"\s+|\S+")
    with pytest.raises(GgufError, match="pre-tokenizer"):
        export(saved("llama"), strange, tmp_path / "draft.gguf")


def test_another_vocabulary_is_refused(saved: Save, target: Path, tmp_path: Path) -> None:
    path = export(saved("llama"), target, tmp_path / "draft.gguf").path
    other = save_tokenizer(tmp_path / "other", size=290)
    tokenizer = json.loads((other / "tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["vocab"] = {piece: (i + 7) % 290 for piece, i in tokenizer["model"]["vocab"].items()}
    with LlamaModel.load(path) as model, pytest.raises(GgufError, match="differ in"):
        check_tokenizer(model, json.dumps(tokenizer))
