"""Test that a draft read from GGUF has the weights, and the logits, that llama.cpp has."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tiny_drafts import CONFIGS, VOCAB, tiny_draft, tiny_tokenizer

from cloud_verifier.distill.errors import GgufError
from cloud_verifier.distill.gguf.reader import read_gguf
from cloud_verifier.distill.gguf.writer import write_gguf
from outrider.llama import LlamaModel, TreeContext
from outrider.llama.model import QuantKind, quantize

TOKENS = np.random.default_rng(1).integers(0, VOCAB - 1, 24).tolist()


def exported(kind: str, folder: Path) -> Path:
    path = folder / f"{kind}.gguf"
    write_gguf(tiny_draft(kind), tiny_tokenizer(), path, kind)
    return path


def llama_logits(path: Path, tokens: list[int]) -> torch.Tensor:
    """Return llama.cpp's logits after every token, `[tokens, V]`."""
    with LlamaModel.load(path) as model, TreeContext(model, n_ctx=64, kv_type="f32") as context:
        return torch.tensor(np.stack([context.reset(tokens[:count]) for count in range(1, len(tokens) + 1)]))


@torch.inference_mode()
def imported_logits(path: Path, tokens: list[int]) -> torch.Tensor:
    logits: torch.Tensor = read_gguf(path)(torch.tensor([tokens])).logits[0]
    return logits


@pytest.mark.parametrize("kind", CONFIGS)
def test_what_was_exported_comes_back_bit_by_bit(kind: str, tmp_path: Path) -> None:
    model, again = tiny_draft(kind), read_gguf(exported(kind, tmp_path))
    weights = again.state_dict()
    assert weights.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(weights[name], tensor), name
    assert again.config.tie_word_embeddings == CONFIGS[kind].tie_word_embeddings


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_are_those_of_llama_cpp(kind: str, tmp_path: Path) -> None:
    path = exported(kind, tmp_path)
    theirs = llama_logits(path, TOKENS)
    torch.testing.assert_close(imported_logits(path, TOKENS), theirs, atol=2e-3 * float(theirs.abs().max()), rtol=0)


@pytest.mark.parametrize(("quant", "share"), [("Q8_0", 0.02), ("F16", 0.005)])
def test_a_quantised_file_is_read_as_llama_cpp_reads_it(quant: QuantKind, share: float, tmp_path: Path) -> None:
    path = tmp_path / "q.gguf"
    quantize(exported("qwen3", tmp_path), path, quant)
    theirs = llama_logits(path, TOKENS)
    # llama.cpp rounds activations to 8 bits too where the weights are; the weights here are exactly the file's.
    error = (imported_logits(path, TOKENS) - theirs).abs().max()
    assert error < share * theirs.abs().max()


def with_field(source: Path, target: Path, key: str, value: str) -> Path:
    """Write a copy with one more key."""
    model = tiny_draft(source.stem)
    writer = gguf.GGUFWriter(target, "llama")
    reader = gguf.GGUFReader(source)
    for name in ("context_length", "embedding_length", "block_count", "feed_forward_length"):
        writer.add_uint32(f"llama.{name}", int(reader.get_field(f"llama.{name}").contents()))
    writer.add_head_count(model.config.num_attention_heads)
    writer.add_head_count_kv(model.config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(VOCAB)
    if value:
        writer.add_string(key, value)
    for tensor in reader.tensors:
        if tensor.name != key:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def test_a_file_that_lacks_a_tensor_is_refused_by_its_name(tmp_path: Path) -> None:
    path = with_field(exported("llama", tmp_path), tmp_path / "lacking.gguf", "blk.1.attn_k.weight", "")
    with pytest.raises(GgufError, match=r"layers\.1\.self_attn\.k_proj"):
        read_gguf(path)


def test_a_tensor_that_has_no_place_is_refused(tmp_path: Path) -> None:
    """transformers would ignore biases in a Llama file, for instance, and the draft would differ."""
    source = exported("qwen2", tmp_path)
    reader = gguf.GGUFReader(source)
    path = tmp_path / "strange.gguf"
    writer = gguf.GGUFWriter(path, "qwen3")
    for field in reader.fields.values():
        if field.name.startswith("qwen2.") and field.types[0] == gguf.GGUFValueType.UINT32:
            writer.add_uint32(field.name.replace("qwen2", "qwen3"), int(field.contents()))
    writer.add_layer_norm_rms_eps(1e-6)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(GgufError, match=r"blk\.0\.attn_k\.bias"):
        read_gguf(path)


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(GgufError, match="mamba"):
        read_gguf(tmp_path / "m.gguf")
