"""Load what is trained, and compare it with the target in one forward pass."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from cloud_verifier.distill.gguf.reader import read_gguf
from cloud_verifier.distill.training.batches import TrainingBatch
from cloud_verifier.distill.training.heads_student import HeadsStudent, load_heads_student
from cloud_verifier.distill.training.losses import divergence
from cloud_verifier.distill.training.plan import TrainingPlan


class Student(nn.Module):
    """A causal LM that computes its logits at labelled positions only."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """Return KL and overlap, each `[n]`."""
        states: Tensor = self.model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
        logits = self.model.lm_head(states.flatten(0, 1)[batch.positions]).float()
        return divergence(logits, batch.top_ids, batch.top_log_probs, batch.tail)


def load_student(plan: TrainingPlan) -> Student | HeadsStudent:
    """Load the plan's base. Raises GgufError, OSError and ValueError."""
    return Student(load_base(plan.base)) if plan.heads is None else load_heads_student(plan)


def load_base(base: Path) -> PreTrainedModel:
    """Load a draft from a GGUF file or a Hugging Face folder, in float32. Raises GgufError, OSError, ValueError."""
    model = read_gguf(base) if base.is_file() else AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.set_attn_implementation("sdpa")  # causal where no mask is given
    return cast(PreTrainedModel, model)
