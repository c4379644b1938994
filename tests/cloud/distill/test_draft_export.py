"""Test that a draft becomes a file that llama.cpp reads as transformers reads the model, and becomes a model again."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tiny_drafts import CONFIGS, VOCAB, tiny_draft, tiny_tokenizer

from cloud_verifier.distill.config import Embeddings, Quantization
from cloud_verifier.distill.gguf_files import export, read_gguf, stored_as, tensor_types, write_gguf
from cloud_verifier.distill.run_folder import StageFailed
from outrider.llama import LlamaModel, TreeContext

IDS = [7, 42, 257, 3, 99, 120, 260, 8, 8, 31]
LARGE = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
"""Sizes whose rows fit the blocks of 4-bit types."""


@pytest.fixture
def target(tmp_path: Path) -> Path:
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    return tmp_path / "target"


def exported(model: torch.nn.Module, target: Path, kind: Quantization, embeddings: Embeddings | None = None) -> Path:
    model.save_pretrained(target.parent / "model")
    out = target.parent / "draft.gguf"
    said = export(target.parent / "model", target, out, kind, embeddings=embeddings)
    assert str(out.stat().st_size) in said
    return out


def llama_logits(path: Path) -> NDArray[np.float32]:
    """Return llama.cpp's logits after every token, `[n, V]`."""
    with LlamaModel.load(path) as model, TreeContext(model, n_ctx=64, kv_type="f32") as context:
        return np.stack([context.reset(IDS[:count]) for count in range(1, len(IDS) + 1)])


@torch.inference_mode()
def logits_of(model: torch.nn.Module) -> NDArray[np.float32]:
    """Return the logits that transformers computes after every token, `[n, V]`."""
    rows: NDArray[np.float32] = model(torch.tensor([IDS])).logits[0].numpy()
    return rows


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_file_has_the_logits_of_the_model_and_comes_back_bit_by_bit(kind: str, target: Path) -> None:
    model = tiny_draft(kind, vocab_size=VOCAB + 10)  # more rows than tokens, as models pad them
    done = exported(model, target, "F32")
    expected = logits_of(model)
    np.testing.assert_allclose(llama_logits(done), expected, atol=2e-3 * float(abs(expected).max()), rtol=0)
    again = read_gguf(done)
    weights = again.state_dict()
    assert weights.keys() == model.state_dict().keys()
    assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())
    assert again.config.tie_word_embeddings == CONFIGS[kind].tie_word_embeddings


@pytest.mark.parametrize("kind", CONFIGS)
def test_eight_bits_are_read_back_as_llama_cpp_reads_them_and_every_matrix_has_them(kind: str, target: Path) -> None:
    model = tiny_draft(kind)
    done = exported(model, target, "Q8_0")
    theirs = llama_logits(done)
    assert np.corrcoef(logits_of(model).ravel(), theirs.ravel())[0, 1] > 0.999
    assert set(tensor_types(done).values()) == {"Q8_0", "F32"}
    # llama.cpp rounds activations to 8 bits too where the weights are; the weights here are exactly the file's.
    assert abs(logits_of(read_gguf(done)) - theirs).max() < 0.03 * abs(theirs).max()


def test_four_bits_take_the_mix_that_is_meant(target: Path) -> None:
    model = tiny_draft("llama", **LARGE)
    done = exported(model, target, "Q4_K_M")
    assert {"Q4_K", "F32"} <= set(tensor_types(done).values()) <= {"Q4_K", "Q6_K", "F32"}
    assert np.corrcoef(logits_of(model).ravel(), llama_logits(done).ravel())[0, 1] > 0.9


def test_a_draft_is_stored_as_the_one_that_it_replaces(target: Path) -> None:
    for kind, embeddings in (("Q8_0", None), ("Q4_0", "Q4_1"), ("F32", None)):
        path = exported(tiny_draft("llama", **LARGE), target, kind, embeddings)
        before = path.read_bytes()
        quantization, of_embeddings = stored_as(path)
        assert quantization == kind
        again = exported(tiny_draft("llama", **LARGE), target, quantization, of_embeddings)
        assert again.read_bytes() == before


def test_embeddings_have_the_type_that_was_asked_for(target: Path) -> None:
    done = exported(tiny_draft("llama", **LARGE), target, "Q4_0", "Q4_1")
    stored = tensor_types(done)
    assert stored["token_embd.weight"] == "Q4_1" and stored["blk.0.ffn_up.weight"] == "Q4_0"


def test_embeddings_that_are_not_trained_come_out_as_they_were(target: Path) -> None:
    done = exported(tiny_draft("llama", **LARGE), target, "Q4_0", "Q4_0")
    first = read_gguf(done)
    again = read_gguf(exported(first, target, *stored_as(done)))
    assert torch.equal(again.get_input_embeddings().weight, first.get_input_embeddings().weight)


def rewritten(source: Path, architecture: str, without: str = "") -> Path:
    """Return a copy of a file of another architecture, or without a tensor."""
    reader, copy = gguf.GGUFReader(source), source.with_name("copy.gguf")
    writer = gguf.GGUFWriter(copy, architecture)
    old = str(reader.get_field("general.architecture").contents())
    for field in reader.fields.values():
        if field.name.startswith(f"{old}.") and field.types[0] == gguf.GGUFValueType.UINT32:
            writer.add_uint32(field.name.replace(old, architecture), int(field.contents()))
    writer.add_layer_norm_rms_eps(1e-6)
    for tensor in reader.tensors:
        if tensor.name != without:
            writer.add_tensor(tensor.name, np.array(tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return copy


@pytest.mark.parametrize(
    ("kind", "architecture", "without", "said"),
    [
        ("llama", "llama", "blk.1.attn_k.weight", r"layers\.1\.self_attn\.k_proj"),
        ("llama", "mamba", "", "mamba"),
    ],
)
def test_a_file_that_is_no_whole_known_model_is_refused(
    kind: str, architecture: str, without: str, said: str, tmp_path: Path
) -> None:
    write_gguf(tiny_draft(kind), tiny_tokenizer(), tmp_path / "draft.gguf", kind)
    with pytest.raises(StageFailed, match=said):
        read_gguf(rewritten(tmp_path / "draft.gguf", architecture, without))
