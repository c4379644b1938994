"""Low-rank adaptation (arXiv 2106.09685) by peft: small additions to the matrices of the layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from transformers import PreTrainedModel

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Not the embeddings: they are tied to the output in small drafts, and an adapter of theirs would not be."""


def add_lora(model: PreTrainedModel, rank: int, alpha: float, seed: int) -> Any:
    """Put adapters into `model`, which from now on trains nothing else; they begin as nothing. Returns peft's handle.

    alpha: their weight as a multiple of the rank. The same seed gives the same adapters.
    """
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank, lora_alpha=alpha * rank, lora_dropout=0.0, target_modules=list(MATRICES), task_type="CAUSAL_LM"
    )
    return get_peft_model(model, config)


def save_adapter(handle: Any, folder: Path) -> None:
    """Write the adapters as peft does: `adapter_model.safetensors` and `adapter_config.json`."""
    handle.save_pretrained(folder, safe_serialization=True)


def merged(handle: Any) -> PreTrainedModel:
    """Return the plain model with the adapters added into its weights."""
    return cast(PreTrainedModel, handle.merge_and_unload())
