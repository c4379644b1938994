"""LoRA adapters as GGUF: the base with the adapter says what the merged model says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from exportable import CONFIGS, logits_of, make_model, save_tokenizer
from numpy.typing import NDArray

from cloud_verifier.distill.errors import GgufError
from cloud_verifier.distill.gguf.adapter import write_adapter
from cloud_verifier.distill.gguf.export import export
from outrider.core.errors import BadRequest, ModelRefused
from outrider.llama import LlamaModel, LoraAdapter, TextReader, TreeContext

peft = pytest.importorskip("peft")

IDS = [5, 77, 130, 3, 250, 18, 18, 299, 41, 9, 160, 2]
EVERYWHERE = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def lora(kind: str, **settings: Any) -> Any:
    """A tiny model with a random adapter on it."""
    chosen = {"r": 4, "lora_alpha": 12, "target_modules": EVERYWHERE, **settings}
    model = peft.get_peft_model(make_model(kind), peft.LoraConfig(task_type="CAUSAL_LM", **chosen))
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.05)
    return model.eval()


def made(kind: str, folder: Path, **settings: Any) -> tuple[Any, Path, Path]:
    """The model with its adapter, the base as GGUF, and the adapter as GGUF."""
    make_model(kind).save_pretrained(folder / "base")
    model = lora(kind, **settings)
    model.save_pretrained(folder / "adapter")
    export(folder / "base", save_tokenizer(folder / "target"), folder / "base.gguf", "F32")
    write_adapter(folder / "adapter", folder / "base", folder / "adapter.gguf")
    return model, folder / "base.gguf", folder / "adapter.gguf"


def read(reader: TextReader) -> NDArray[np.float32]:
    return np.concatenate(list(reader.read(IDS)))


@pytest.mark.parametrize("kind", sorted(CONFIGS))
def test_base_and_adapter_say_what_the_merged_model_says(kind: str, tmp_path: Path) -> None:
    model, base, adapter = made(kind, tmp_path)
    with LlamaModel.load(base) as loaded, TextReader(loaded, length=64) as reader:
        plain = read(reader)
        reader.adapt(LoraAdapter.load(loaded, adapter))
        adapted = read(reader)
        reader.adapt(None)
        assert np.array_equal(read(reader), plain)
    merged = logits_of(model.merge_and_unload(), IDS)
    assert np.allclose(adapted, merged, atol=5e-3)
    assert np.abs(adapted - plain).max() > 0.1


def test_rank_stabilised_adapters_keep_their_factor(tmp_path: Path) -> None:
    model, base, adapter = made("llama", tmp_path, use_rslora=True)
    with LlamaModel.load(base) as loaded, TextReader(loaded, length=64) as reader:
        reader.adapt(LoraAdapter.load(loaded, adapter))
        assert np.allclose(read(reader), logits_of(model.merge_and_unload(), IDS), atol=5e-3)


def test_a_tree_is_forgotten_with_the_weights_that_it_was_computed_with(tmp_path: Path) -> None:
    model, base, adapter = made("qwen3", tmp_path)
    with LlamaModel.load(base) as loaded, TreeContext(loaded, n_ctx=64, kv_type="f32") as context:
        context.reset(IDS)
        context.adapt(LoraAdapter.load(loaded, adapter))
        assert context.length == 0
        assert np.allclose(context.reset(IDS), logits_of(model.merge_and_unload(), IDS)[-1], atol=5e-3)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    _, base, adapter = made("llama", tmp_path / "one")
    _, other, _ = made("qwen3", tmp_path / "two")
    with LlamaModel.load(base) as first, LlamaModel.load(other) as second:
        with pytest.raises(ModelRefused, match="mismatch"):
            LoraAdapter.load(second, adapter)
        with pytest.raises(ModelRefused):
            LoraAdapter.load(first, other)
        loaded = LoraAdapter.load(first, adapter)
        with TextReader(second, length=8) as reader, pytest.raises(BadRequest, match="was loaded for"):
            reader.adapt(loaded)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"rank_pattern": {"q_proj": 2}}, "rank_pattern"),
        ({"bias": "all"}, "bias"),
        ({"peft_type": "IA3"}, "IA3"),
    ],
)
def test_what_the_format_has_no_place_for_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_model("qwen2").save_pretrained(tmp_path / "base")
    lora("qwen2").save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(GgufError, match=message):
        write_adapter(tmp_path / "adapter", tmp_path / "base", tmp_path / "adapter.gguf")
    assert not (tmp_path / "adapter.gguf").exists()


def test_adapted_embeddings_are_refused(tmp_path: Path) -> None:
    make_model("llama").save_pretrained(tmp_path / "base")
    lora("llama", target_modules=["q_proj", "embed_tokens"]).save_pretrained(tmp_path / "adapter")
    with pytest.raises(GgufError, match="embed_tokens"):
        write_adapter(tmp_path / "adapter", tmp_path / "base", tmp_path / "adapter.gguf")
