"""The target: trained on the whole mixture, saved as sharded bf16 safetensors beside its tokenizer."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from models.recipe.network import new_model
from models.recipe.settings import Job
from models.recipe.train import TextLessons, train
from models.recipe.windows import Mixture

_MAX_SHARD = "14MB"


def build(job: Job) -> None:
    """Train the target and write the Hugging Face directory ``target/model``."""
    folder = job.stage("target")
    mixture = Mixture(job.stage("tokens"), job.mixture, job.seed)
    model = new_model(job.scale.target, job.seed).to(job.device)
    plan = job.scale.target_plan
    progress = train(model, plan, folder, TextLessons(mixture, plan, job.device))
    save_model(model, job, folder / "model")
    (folder / "done.json").write_text(json.dumps(asdict(progress)), encoding="utf-8")


def save_model(model: Qwen3ForCausalLM, job: Job, folder: Path) -> None:
    """Write a model in bf16, no file above 15 MB, with tokenizer and chat template."""
    model.to(torch.bfloat16).save_pretrained(folder, max_shard_size=_MAX_SHARD)
    PreTrainedTokenizerFast.from_pretrained(job.stage("tokenizer")).save_pretrained(folder)


def load_model(folder: Path, dtype: torch.dtype = torch.float32) -> Qwen3ForCausalLM:
    """Load a model directory for inference."""
    model: Qwen3ForCausalLM = Qwen3ForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    return model.eval()
