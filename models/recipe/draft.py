"""The drafts: warmed up on plain text, then distilled from what the target wrote.

``narrow`` is the same draft by the same procedure, but all it ever saw is code.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3ForCausalLM

from cloud_verifier.distill.training.losses import divergence, loss
from models.recipe.checkpoint import Progress
from models.recipe.network import hidden_states, new_model, pieces, use_training_attention
from models.recipe.schedule import TrainStep
from models.recipe.settings import NARROW_MIXTURE, DistilPlan, Job
from models.recipe.target import load_model, save_model
from models.recipe.train import TextLessons, train
from models.recipe.windows import Mixture

_ROWS_AT_ONCE = {"cpu": 4, "cuda": 128}
"""Rows of a generated part that go through the draft at a time."""
NARROW_KINDS = ("code",)


def warm(job: Job) -> None:
    """Train the draft on the target's own corpus."""
    _warm(job, "warm", job.mixture)


def warm_narrow(job: Job) -> None:
    """Train the narrow draft on code alone."""
    _warm(job, "warm-narrow", NARROW_MIXTURE)


def distil(job: Job) -> None:
    """Distil the draft from everything the target wrote."""
    _distil(job, "draft", "warm", None)


def distil_narrow(job: Job) -> None:
    """Distil the narrow draft from the code the target wrote."""
    _distil(job, "draft-narrow", "warm-narrow", NARROW_KINDS)


@dataclass(frozen=True)
class Rows:
    """Some rows of a generated part, as tensors; see ``generate`` for the shapes."""

    tokens: Tensor
    top_ids: Tensor
    top_log_probs: Tensor
    counted: Tensor


class TargetLessons:
    """Batches of the target's text; the loss moves from KL to accepted probability mass."""

    def __init__(self, parts: list[dict[str, Tensor]], plan: DistilPlan, seed: int, device: str) -> None:
        self._parts = parts
        self._plan = plan
        self._seed = seed
        self._device = device

    def batch(self, progress: Progress, step_plan: TrainStep) -> Sequence[Rows]:
        """Return one generated part; every part comes once per epoch."""
        epoch, place = divmod(progress.step, len(self._parts))
        order = np.random.default_rng([self._seed, epoch]).permutation(len(self._parts))
        part = self._parts[order[place]]
        at_once = _ROWS_AT_ONCE[torch.device(self._device).type]
        slices = {name: pieces(_signed(tensor).to(self._device), at_once) for name, tensor in part.items()}
        return [Rows(**dict(zip(slices, group, strict=True))) for group in zip(*slices.values(), strict=True)]

    def size(self, part: Rows) -> int:
        """Return the number of tokens that the target wrote before it came to an end."""
        return int(part.counted.sum())

    def loss(self, model: Qwen3ForCausalLM, part: Rows, step_plan: TrainStep) -> Tensor:
        """Return the mean loss over the counted positions."""
        count = part.top_ids.shape[1]
        ids = part.tokens.long()
        with torch.autocast(ids.device.type, torch.bfloat16):
            states = hidden_states(model, ids[:, :-1])[:, -count:]
            logits = model.lm_head(states[part.counted])
        log_probs = part.top_log_probs[part.counted].float()
        tail = 1 - log_probs.exp().sum(1)
        divergences = divergence(logits.float(), part.top_ids[part.counted].long(), log_probs, tail)
        kl, overlap = (values.mean() for values in divergences)
        if step_plan.share < self._plan.kl_share:
            return kl
        return loss(kl, overlap, "hybrid", overlap.item(), self._plan.hybrid_eta)


def _warm(job: Job, stage: str, shares: dict[str, int]) -> None:
    folder, plan = job.stage(stage), job.scale.warm_plan
    model = new_model(job.scale.draft, job.seed + 1).to(job.device)
    mixture = Mixture(job.stage("tokens"), shares, job.seed)
    progress = train(model, plan, folder, TextLessons(mixture, plan, job.device))
    model.save_pretrained(folder / "model")
    (folder / "done.json").write_text(json.dumps(asdict(progress)), encoding="utf-8")


def _distil(job: Job, stage: str, warmed: str, kinds: tuple[str, ...] | None) -> None:
    folder, plan = job.stage(stage), job.scale.distil
    model = load_model(job.stage(warmed) / "model").to(job.device)
    use_training_attention(model)
    parts = load_parts(job.stage("generate"), kinds)
    progress = train(model, plan.training, folder, TargetLessons(parts, plan, job.seed, job.device))
    save_model(model, job, folder / "model")
    (folder / "done.json").write_text(json.dumps(asdict(progress)), encoding="utf-8")


def load_parts(folder: Path, kinds: tuple[str, ...] | None) -> list[dict[str, Tensor]]:
    """Load the generated parts whose prompts are of the given kinds (all kinds by default)."""
    chosen = []
    for path in sorted(folder.glob("part-*.json")):
        if kinds is None or json.loads(path.read_text())["kind"] in kinds:
            chosen.append(load_file(path.with_suffix(".safetensors")))
    if not chosen:
        raise ValueError(f"no generated text of kinds {kinds} in {folder.name}: run the stage 'generate' first")
    return chosen


def _signed(tensor: Tensor) -> Tensor:
    """Return ids as int32, since CUDA cannot index uint16."""
    return tensor.int() if tensor.dtype == torch.uint16 else tensor
