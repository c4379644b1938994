"""From a trained Hugging Face draft to the one file that devices load: GGUF, quantised, and checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from cloud_verifier.distill.gguf import parity
from cloud_verifier.distill.gguf.exporter import ExportError, check_types, export_gguf, tensor_types
from outrider.artifacts import atomic_files
from outrider.core.errors import ModelRefused
from outrider.llama import LlamaModel
from outrider.llama.quantize import quantize

Kind = Literal["F32", "F16", "Q8_0", "Q6_K", "Q4_K_M", "Q4_0"]


@dataclass(frozen=True)
class Exported:
    """What came out."""

    path: Path
    size: int
    """Bytes."""
    types: Mapping[str, int]
    """Storage type -> how many tensors."""
    probes: int
    """Strings that llama.cpp and the tokenizer split alike."""


def export(
    model_folder: Path,
    tokenizer_folder: Path,
    out: Path,
    kind: Kind = "Q8_0",
    *,
    widened: Sequence[str] = (),
    threads: int = 1,
) -> Exported:
    """Write a draft for the target whose tokenizer is in `tokenizer_folder`; `out` appears once all checks passed.

    widened: patterns of the tensors that may be stored wider than `kind`, since their rows do not fit its blocks.
    Raises ExportError for a model or tokenizer that cannot be exported, or for a file that fails a check.
    """
    tokenizer_json = tokenizer_folder / "tokenizer.json"
    if not tokenizer_json.is_file():
        raise ExportError(f"{tokenizer_folder} has no tokenizer.json: give the target's folder")
    full = out.with_name(out.name + ".f32")
    try:
        with atomic_files.replacing(out) as unchecked:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder, local_files_only=True)
            export_gguf(load_model(model_folder), tokenizer, full, name=f"draft-{model_folder.parent.name}")
            _quantize(full, unchecked, kind, threads)
            check_types(unchecked, kind, widened)
            with _loaded(unchecked) as model:
                probes = parity.check(model, tokenizer_json.read_text(encoding="utf-8"))
            types = Counter(tensor_types(unchecked).values())
    finally:
        full.unlink(missing_ok=True)
    return Exported(out, out.stat().st_size, dict(types), probes)


def load_model(folder: Path) -> PreTrainedModel:
    """The causal LM in a folder, in float32. Raises ExportError."""
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False, use_safetensors=True
        )
    except (OSError, ValueError) as error:
        raise ExportError(f"{folder} holds no causal LM that transformers can load: {error}") from error
    return cast(PreTrainedModel, model.eval())


def _quantize(full: Path, out: Path, kind: Kind, threads: int) -> None:
    if kind == "F32":
        full.rename(out)
        return
    try:
        quantize(full, out, kind, threads)
    except ValueError as error:
        raise ExportError(str(error)) from error


def _loaded(path: Path) -> LlamaModel:
    try:
        return LlamaModel.load(path)
    except ModelRefused as error:
        raise ExportError(f"llama.cpp does not load what was exported: {error}") from error
