"""Load what is trained, a draft with LoRA adapters if asked, and compare it with the target in one forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from cloud_verifier.distill.gguf.reader import read_gguf
from cloud_verifier.distill.training.batches import TrainingBatch
from cloud_verifier.distill.training.heads_student import HeadsStudent, load_heads_student
from cloud_verifier.distill.training.losses import divergence
from cloud_verifier.distill.training.plan import TrainingPlan

_LORA_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Matrices that get adapters. The embeddings do not: small drafts tie them to the output, which an adapter would not
follow."""


class Student(nn.Module):
    """A causal LM that computes its logits at labelled positions only."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: TrainingBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Return KL, overlap, and whether draft and target agree on the likeliest token, each `[n]`."""
        states: Tensor = self.model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
        logits = self.model.lm_head(states.flatten(0, 1)[batch.positions]).float()
        kl, overlap = divergence(logits, batch.top_ids, batch.top_log_probs, batch.tail)
        return kl, overlap, logits.detach().argmax(1) == batch.top_ids[:, 0]


def load_student(plan: TrainingPlan) -> tuple[Student | HeadsStudent, Any | None]:
    """Load the plan's base, and return it with peft's model around it where the plan asks for LoRA (arXiv 2106.09685).

    Then adapters are added, the same for the same plan, which change nothing yet, and all other weights are frozen.
    Raises GgufError, OSError and ValueError.
    """
    if plan.heads is not None:
        return load_heads_student(plan), None
    model = load_base(plan.base)
    if not plan.lora_rank:
        return Student(model), None
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(plan.seed)
    rank, alpha, matrices = plan.lora_rank, plan.lora_alpha * plan.lora_rank, list(_LORA_MATRICES)
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=matrices, task_type="CAUSAL_LM")
    return Student(model), get_peft_model(model, config)


def load_base(base: Path) -> PreTrainedModel:
    """Load a draft from a GGUF file or a Hugging Face folder, in float32. Raises GgufError, OSError, ValueError."""
    model = read_gguf(base) if base.is_file() else AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.set_attn_implementation("sdpa")  # causal where no mask is given
    return cast(PreTrainedModel, model)
