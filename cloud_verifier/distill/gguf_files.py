"""Read a draft's GGUF file as a Hugging Face model that can be trained, and write a trained one, quantized.

Llama, Qwen2 and Qwen3 are supported, with a byte-level BPE. transformers reads the file, `gguf` writes it, llama.cpp
quantizes it and reads it back. Devices and verifiers exchange token ids, so that nothing splits text by a draft's file.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast, get_args

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from cloud_verifier.distill.config import Embeddings, Quantization
from cloud_verifier.distill.run_folder import StageFailed
from outrider.artifacts import atomic_files
from outrider.core.errors import ModelRefused, VocabularyMismatch
from outrider.core.vocabulary import compare_token_tables, token_table
from outrider.llama import LlamaModel
from outrider.llama.model import quantize

ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
}


def read_gguf(path: Path) -> PreTrainedModel:
    """Return the model of a GGUF file, dequantised to float32. Raises StageFailed for a file that is no whole model, or
    one that transformers would read otherwise than llama.cpp does."""
    reader = _open(path)
    architecture = str(_value(reader, "general.architecture"))
    if architecture not in ARCHITECTURES:
        raise StageFailed(f"{path.name} is a {architecture} model; known are {', '.join(sorted(ARCHITECTURES))}")
    scaling = _value(reader, f"{architecture}.rope.scaling.type", "none")
    if scaling != "none" or any(tensor.name.startswith("rope_") for tensor in reader.tensors):
        raise StageFailed(f"{path.name} scales its positions ({scaling}); only plain rotary positions are known")
    config: Any = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    width = config.hidden_size // config.num_attention_heads
    config.head_dim = int(_value(reader, f"{architecture}.attention.key_length", width))
    model, report = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, config=copy.deepcopy(config), dtype=torch.float32, output_loading_info=True
    )
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    if missing := sorted(set(report["missing_keys"]) - tied):
        raise StageFailed(f"{path.name} lacks {', '.join(missing)}")
    # transformers refuses to save a model that it has read from GGUF, which it considers quantized.
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict())
    return cast(PreTrainedModel, plain.eval())


def stored_as(path: Path) -> tuple[Quantization, Embeddings | None]:
    """Return how a file is quantized, and the type of its embeddings, for `export` to do the same.

    A type that `export` does not know is Q8_0; of such embeddings the choice is llama.cpp's (None).
    """
    number = int(_value(_open(path), "general.file_type", gguf.LlamaFileType.MOSTLY_Q8_0))
    names = {kind.value: kind.name.partition("_")[2] for kind in gguf.LlamaFileType}
    quantization, embeddings = names.get(number), tensor_types(path).get("token_embd.weight")
    return (
        cast(Quantization, quantization) if quantization in get_args(Quantization) else "Q8_0",
        cast(Embeddings, embeddings) if embeddings in get_args(Embeddings) else None,
    )


def tensor_types(path: Path) -> dict[str, str]:
    """Return the storage type of every tensor of a GGUF file, by name."""
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


def export(
    model_folder: Path,
    tokenizer_folder: Path,
    out: Path,
    quantization: Quantization = "Q8_0",
    *,
    embeddings: Embeddings | None = None,
    threads: int = 1,
) -> str:
    """Write a draft for the target whose tokenizer is in `tokenizer_folder`, and return a line that describes the file.

    `out` appears once llama.cpp has read it, with the target's vocabulary. embeddings: type of the embeddings and the
    output layer, which are most of a small draft; None leaves the choice to llama.cpp, which takes a wide one. Raises
    StageFailed for a model or tokenizer that cannot be exported, or for a file that fails a check.
    """
    tokenizer_json = tokenizer_folder / "tokenizer.json"
    if not tokenizer_json.is_file():
        raise StageFailed(f"{tokenizer_folder} has no tokenizer.json: give the target's folder")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder, local_files_only=True)
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            model_folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    except (OSError, ValueError) as error:
        raise StageFailed(f"{model_folder} holds no causal LM that transformers can load: {error}") from error
    full = out.with_name(out.name + ".f32")
    try:
        with atomic_files.replacing(out) as unchecked:
            write_gguf(model, tokenizer, full, name=f"draft-{model_folder.parent.name}")
            if quantization == "F32":
                full.rename(unchecked)
            else:
                quantize(full, unchecked, quantization, threads, embeddings=embeddings)
            with LlamaModel.load(unchecked) as loaded:
                compare_token_tables(loaded.token_table(), token_table(tokenizer_json.read_bytes()))
            types = Counter(tensor_types(unchecked).values())
    except (ModelRefused, VocabularyMismatch) as error:
        raise StageFailed(f"llama.cpp does not take what was exported: {error}") from error
    finally:
        full.unlink(missing_ok=True)
    return f"{out}: {out.stat().st_size} bytes, {', '.join(f'{n} {name}' for name, n in sorted(types.items()))}"


def write_gguf(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, path: Path, name: str) -> None:
    """Write `model` in F32 to the file `path`, which is half written if this fails. Raises StageFailed."""
    config: Any = model.config
    architecture = ARCHITECTURES.get(config.model_type)
    if architecture is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise StageFailed(f"model type {config.model_type!r} cannot be exported; known are {known}")
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[architecture])
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
    _write_tokenizer(writer, tokenizer, config.vocab_size)
    for tensor_name, array in _tensors(model, gguf.get_tensor_name_map(architecture, config.num_hidden_layers)):
        writer.add_tensor(tensor_name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _open(path: Path) -> Any:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise StageFailed(f"{path.name} is not a GGUF file: it starts with {magic!r}")
    return gguf.GGUFReader(path)


def _value(reader: Any, key: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    return default if field is None else field.contents()


def _rope_base(config: Any) -> float:
    rope = getattr(config, "rope_parameters", None) or {}
    kind = rope.get("rope_type", "default")
    if kind != "default":
        raise StageFailed(f"rope type {kind!r} cannot be exported; only 'default' can")
    return float(rope.get("rope_theta") or config.rope_theta)


def _write_tokenizer(writer: gguf.GGUFWriter, tokenizer: PreTrainedTokenizerFast, width: int) -> None:
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    if state["model"]["type"] != "BPE":
        raise StageFailed(f"the tokenizer is a {state['model']['type']}, and only a byte-level BPE can be exported")
    special = {item["id"] for item in state["added_tokens"] if item["special"]}
    by_id = {index: token for token, index in tokenizer.get_vocab().items()}
    kinds = {index: gguf.TokenType.CONTROL if index in special else gguf.TokenType.NORMAL for index in by_id}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")  # how llama.cpp would split text, which it never does here
    # Embedding rows beyond the vocabulary, which are padding, need names too.
    writer.add_token_list([by_id.get(index, f"[PAD{index}]") for index in range(width)])
    writer.add_token_types([kinds.get(index, gguf.TokenType.UNUSED) for index in range(width)])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in state["model"]["merges"]])
    writer.add_add_bos_token(False)
    if tokenizer.eos_token_id is not None:
        writer.add_eos_token_id(tokenizer.eos_token_id)


def _tensors(model: PreTrainedModel, names: gguf.TensorNameMap) -> Iterator[tuple[str, NDArray[np.float32]]]:
    config: Any = model.config
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue  # llama.cpp takes the embeddings instead
        mapped = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if mapped is None:
            raise StageFailed(f"tensor {name!r} has no place in a {config.model_type} GGUF file")
        array = tensor.detach().to(torch.float32).cpu().numpy()
        if config.model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            # From Hugging Face's half-split rotary layout to llama.cpp's interleaved one.
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            rows, columns = array.shape
            halves = array.reshape(heads, 2, rows // heads // 2, columns)
            array = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(rows, columns))
        yield mapped, array
