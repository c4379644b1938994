"""The draft while it learns: one forward pass from tokens to how far it is from the target."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from cloud_verifier.distill.gguf.importer import import_gguf
from cloud_verifier.distill.training.batches import Batch
from cloud_verifier.distill.training.losses import Divergence, divergence


class Student(nn.Module):
    """A causal LM, of which only the logits that are learnt from are computed.

    All of it is one module with one forward: the ranks that share it gather its weights at that door.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Return KL, overlap and whether the likeliest tokens are the same, each `[n]`."""
        states: Tensor = self.model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
        logits = self.model.lm_head(states.flatten(0, 1)[batch.places]).float()
        found: Divergence = divergence(logits, batch.top_ids, batch.top_log_probs, batch.tail)
        agreed = logits.detach().argmax(1) == batch.top_ids[:, 0]
        return found.kl, found.overlap, agreed

    @property
    def layers(self) -> nn.ModuleList:
        return cast(nn.ModuleList, self.model.model.layers)


def load_base(base: Path) -> PreTrainedModel:
    """Load what a run begins with, in float32. Raises GgufRefused, OSError, ValueError."""
    model = import_gguf(base) if base.is_file() else AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    # The usual kernel for whole rows: with no mask given, it is causal.
    model.set_attn_implementation("sdpa")
    return cast(PreTrainedModel, model)
