"""Write a Hugging Face causal LM and its tokenizer as one GGUF file, with the `gguf` package alone.

Llama, Qwen2 and Qwen3 are supported. The tokenizer must be a byte-level BPE with a pre-tokenizer that llama.cpp knows
by name: with another one a third of all strings would split differently on the two sides.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from cloud_verifier.distill.errors import GgufError

Array = NDArray[np.float32]

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS = {
    QWEN2_SPLIT: "qwen2",
    QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|"): "llama-bpe",
}
"""llama.cpp's names of pre-tokenizers, by their patterns in tokenizer.json."""


def write_gguf(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, path: Path, name: str) -> None:
    """Write `model` in F32 to the file `path`, which is half written if this fails. Raises GgufError."""
    config = model.config
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise GgufError(f"model type {config.model_type!r} cannot be exported; known are {known}")
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
    _write_hyperparameters(writer, config, name)
    _write_tokenizer(writer, tokenizer, config.vocab_size)
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    for tensor_name, array in _tensors(model, names):
        writer.add_tensor(tensor_name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def tensor_types(path: Path) -> dict[str, str]:
    """Return the storage type of every tensor of a GGUF file, by name."""
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


def _write_hyperparameters(writer: gguf.GGUFWriter, config: Any, name: str) -> None:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    # Without these llama.cpp divides the hidden size by the number of heads, which is wrong for Qwen3.
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(_rope_base(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _rope_base(config: Any) -> float:
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind != "default":
        raise GgufError(f"rope type {kind!r} cannot be exported; only 'default' can")
    return float(rope.get("rope_theta") or config.rope_theta)


def _write_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast, width: int) -> None:
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    special = {item["id"] for item in state["added_tokens"] if item["special"]}
    by_id = {index: token for token, index in tokenizer.get_vocab().items()}
    kinds = {index: gguf.TokenType.CONTROL if index in special else gguf.TokenType.NORMAL for index in by_id}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(_pre_tokenizer_name(state))
    # Embedding rows beyond the vocabulary, which are padding, need names too.
    writer.add_token_list([by_id.get(index, f"[PAD{index}]") for index in range(width)])
    writer.add_token_types([kinds.get(index, gguf.TokenType.UNUSED) for index in range(width)])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in state["model"]["merges"]])
    writer.add_add_bos_token(False)
    if tokenizer.eos_token_id is not None:
        writer.add_eos_token_id(tokenizer.eos_token_id)
    if tokenizer.pad_token_id is not None:
        writer.add_pad_token_id(tokenizer.pad_token_id)
    if tokenizer.chat_template:
        writer.add_chat_template(cast(str, tokenizer.chat_template))


def _pre_tokenizer_name(state: Mapping[str, Any]) -> str:
    """Return llama.cpp's name for the pre-tokenizer of a parsed `tokenizer.json`. Raises GgufError."""
    if state["model"]["type"] != "BPE" or state.get("normalizer"):
        raise GgufError("only a byte-level BPE without a normaliser splits as llama.cpp does")
    steps = state["pre_tokenizer"]
    if steps["type"] == "ByteLevel" and steps["use_regex"]:
        return "gpt-2"
    if steps["type"] == "Sequence" and len(steps["pretokenizers"]) == 2:
        split, byte_level = steps["pretokenizers"]
        if split["type"] == "Digits" and split["individual_digits"] and byte_level["use_regex"]:
            return "smollm"
        name = _PRE_TOKENIZERS.get(split.get("pattern", {}).get("Regex", ""))
        if name and split["behavior"] == "Isolated" and not byte_level["use_regex"]:
            return name
    raise GgufError("the tokenizer's pre-tokenizer is none that llama.cpp has; train with the qwen2 pattern")


def _tensors(model: PreTrainedModel, names: gguf.TensorNameMap) -> Iterator[tuple[str, Array]]:
    config = model.config
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue  # llama.cpp takes the embeddings instead
        mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if mapped is None:
            raise GgufError(f"tensor {name!r} has no place in a {config.model_type} GGUF file")
        array = tensor.detach().to(torch.float32).cpu().numpy()
        if config.model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = _interleave_rotary(array, heads)
        yield mapped, array


def _interleave_rotary(weight: Array, heads: int) -> Array:
    """Reorder rows from Hugging Face's half-split rotary layout to llama.cpp's interleaved one."""
    rows, columns = weight.shape
    halves = weight.reshape(heads, 2, rows // heads // 2, columns)
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))
