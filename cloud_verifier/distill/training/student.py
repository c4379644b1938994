"""Load what is trained, a draft with LoRA adapters if asked, and compare it with the target in one forward pass."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from cloud_verifier.distill.gguf_files import read_gguf
from cloud_verifier.distill.training.heads_student import HeadsStudent, load_heads_student
from cloud_verifier.distill.training.losses import OutputColumns, sums_of_texts
from cloud_verifier.distill.training.plan import TrainingPlan

_LORA_MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Matrices that get adapters. The embeddings do not: small drafts tie them to the output, which an adapter would not
follow."""


class Student(nn.Module):
    """A causal LM that computes its logits at labelled positions only, and in training for some ids only.

    merged: returns the model without the adapters that `model` has, their products added to its weights.
    """

    accepts_loss_kwargs = True  # the trainer divides by the labels of all forward passes of a step

    def __init__(self, model: PreTrainedModel, merged: Callable[[], PreTrainedModel] | None = None) -> None:
        super().__init__()
        self.model = model
        self.merged = merged or (lambda: model)

    def forward(
        self, input_ids: Tensor, labels: Tensor, top_ids: Tensor, top_log_probs: Tensor, tail: Tensor
    ) -> Tensor:
        """Return each text's sums of labelled positions, KL and overlap, `[b, 3]`. The arguments are `collate`'s."""
        states: Tensor = self.model.model(input_ids=input_ids, use_cache=False).last_hidden_state
        labelled = labels >= 0
        target = top_ids[labelled], top_log_probs[labelled], tail[labelled]
        kl, overlap = OutputColumns(self.model.lm_head, target, sampled=self.training).divergence(states[labelled])
        return sums_of_texts(labelled, torch.stack((torch.ones_like(kl), kl, overlap)))


def load_student(plan: TrainingPlan) -> Student | HeadsStudent:
    """Load the plan's base, with LoRA adapters that change nothing yet if the plan asks for them (arXiv 2106.09685).

    Adapters are the same for the same plan, and all other weights are frozen then. Raises StageFailed, OSError and
    ValueError.
    """
    if plan.heads is not None:
        return load_heads_student(plan)
    base = plan.base
    model = read_gguf(base) if base.is_file() else AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model.set_attn_implementation("sdpa")  # causal where no mask is given
    if not plan.train_embeddings:
        for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
            layer.requires_grad_(False)
    if not plan.lora_rank:
        return Student(model)
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(plan.seed)
    rank, matrices = plan.lora_rank, list(_LORA_MATRICES)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, lora_dropout=0.0, target_modules=matrices, task_type="CAUSAL_LM")
    return Student(model, get_peft_model(model, config).merge_and_unload)
