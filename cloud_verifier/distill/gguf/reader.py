"""Read a draft's GGUF file as a Hugging Face model that can be trained, the inverse of `gguf.writer`.

transformers reads the file. This module raises errors for what transformers ignores: unknown tensors, missing weights,
scaled positions, and head widths that do not follow from the other sizes.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, cast, get_args

import gguf
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from cloud_verifier.distill.config import Embeddings, Quantization
from cloud_verifier.distill.errors import GgufError
from cloud_verifier.distill.gguf.writer import ARCHITECTURES, tensor_types


def read_gguf(path: Path) -> PreTrainedModel:
    """Return the model of a GGUF file, dequantised to float32. Raises GgufError, OSError."""
    reader = _open(path)
    architecture = str(_value(reader, "general.architecture"))
    if architecture not in ARCHITECTURES:
        raise GgufError(f"{path.name} is a {architecture} model; known are {', '.join(sorted(ARCHITECTURES))}")
    _check_positions(reader, architecture, path)
    config = _config(reader, architecture, path)
    _check_names(reader, architecture, config, path)
    model, report = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, config=copy.deepcopy(config), dtype=torch.float32, output_loading_info=True
    )
    tied = {"lm_head.weight"} if config.tie_word_embeddings else set()
    missing = sorted(set(report["missing_keys"]) - tied)
    if missing:
        raise GgufError(f"{path.name} lacks {', '.join(missing)}")
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


def _open(path: Path) -> Any:
    with path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise GgufError(f"{path.name} is not a GGUF file: it starts with {magic!r}")
    return gguf.GGUFReader(path)


def _value(reader: Any, key: str, default: Any = None) -> Any:
    field = reader.get_field(key)
    return default if field is None else field.contents()


def _check_positions(reader: Any, architecture: str, path: Path) -> None:
    scaling = _value(reader, f"{architecture}.rope.scaling.type", "none")
    if scaling != "none":
        raise GgufError(f"{path.name} scales its positions ({scaling}); only plain rotary positions are known")
    if any(tensor.name.startswith("rope_") for tensor in reader.tensors):
        raise GgufError(f"{path.name} has rotary factors of its own; only plain rotary positions are known")


def _config(reader: Any, architecture: str, path: Path) -> PretrainedConfig:
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    width = config.hidden_size // config.num_attention_heads
    head_dim = int(_value(reader, f"{architecture}.attention.key_length", width))
    if architecture == "qwen2" and head_dim != width:
        raise GgufError(f"{path.name} has heads {head_dim} wide, and transformers knows Qwen2 only with {width}")
    config.head_dim = head_dim
    return config


def _check_names(reader: Any, architecture: str, config: PretrainedConfig, path: Path) -> None:
    """Raise GgufError for a tensor that the model would ignore."""
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], config.num_hidden_layers)
    known = {names.get_name(name, try_suffixes=(".weight", ".bias")) for name in empty.state_dict()}
    strange = sorted({tensor.name for tensor in reader.tensors} - known)
    if strange:
        raise GgufError(f"{path.name} has tensors that a {architecture} model does not: {', '.join(strange[:4])}")
