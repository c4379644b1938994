"""Write a peft LoRA as a GGUF adapter, a small file that llama.cpp applies to the draft it was trained from.

llama.cpp adds `alpha / rank * B(Ax)`, with one alpha for the file and the rank of each pair of matrices. An adapter
changes matrices of the layers only, neither embeddings nor outputs tied to them.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open

from cloud_verifier.distill.errors import GgufError
from cloud_verifier.distill.gguf.writer import architecture_of, interleave_rotary, writing

_NAME = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])(\.default)?\.weight")
_PLAIN = {"use_dora": False, "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None, "bias": "none"}
"""The only values of these fields of a peft configuration that a GGUF adapter can express."""


def write_adapter(adapter_folder: Path, base_folder: Path, out: Path) -> None:
    """Write the adapter to `out`, which appears whole or not at all. Raises GgufError.

    adapter_folder: `adapter_config.json` and `adapter_model.safetensors`. base_folder: the Hugging Face model that it
    belongs to, of which only `config.json` is read.
    """
    config, base = _json(adapter_folder / "adapter_config.json"), _json(base_folder / "config.json")
    if config.get("peft_type") != "LORA":
        raise GgufError(f"the adapter is a {config.get('peft_type')}, only LORA can be exported")
    for field, plain in _PLAIN.items():
        if config.get(field, plain) not in (plain, None):
            raise GgufError(f"{field} is {config[field]!r}, must be {plain!r}: a GGUF adapter has no place for it")
    architecture = architecture_of(base.get("model_type"))
    with writing(out, architecture) as writer:
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, _alpha(config))
        names = gguf.get_tensor_name_map(architecture, base["num_hidden_layers"])
        for name, array in _tensors(adapter_folder / "adapter_model.safetensors", base, names):
            writer.add_tensor(name, array)


def _alpha(config: dict[str, Any]) -> float:
    """Return the alpha with which llama.cpp computes peft's scale."""
    rank, alpha = int(config["r"]), float(config["lora_alpha"])
    return alpha * math.sqrt(rank) if config.get("use_rslora") else alpha


def _tensors(path: Path, base: dict[str, Any], names: gguf.TensorNameMap) -> Iterator[tuple[str, NDArray[np.float32]]]:
    with safe_open(path, framework="numpy") as file:
        for key in sorted(file.keys()):
            parts = _NAME.fullmatch(key)
            mapped = names.get_name(f"{parts['module']}.weight", try_suffixes=(".weight",)) if parts else None
            if parts is None or mapped is None or "embd" in mapped or mapped == "output.weight":
                raise GgufError(f"{key} has no place in a GGUF adapter: adapt matrices of the layers only")
            array = file.get_tensor(key).astype(np.float32)
            if parts["half"] == "B" and base["model_type"] == "llama":
                array = _reordered(array, parts["module"], base)
            yield f"{mapped}.lora_{parts['half'].lower()}", array


def _reordered(array: NDArray[np.float32], module: str, base: dict[str, Any]) -> NDArray[np.float32]:
    """Return B with its rows in llama.cpp's order, which is another for the matrices of queries and keys."""
    if module.endswith("q_proj"):
        return interleave_rotary(array, base["num_attention_heads"])
    if module.endswith("k_proj"):
        return interleave_rotary(array, base.get("num_key_value_heads") or base["num_attention_heads"])
    return array


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise GgufError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise GgufError(f"{path} holds a {type(value).__name__}, must be an object")
    return value
