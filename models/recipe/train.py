"""The training loop that target and drafts share: resumable, cut short at any time, finished by a decay."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from models.recipe import checkpoint, schedule
from models.recipe.checkpoint import Progress
from models.recipe.network import optimizers_for, pieces, text_loss
from models.recipe.schedule import TrainStep
from models.recipe.settings import TrainPlan
from models.recipe.windows import Mixture
from outrider.processes import signals_held

Part = TypeVar("Part")
_GRADIENT_NORM = 1.0


class Lessons(Protocol[Part]):
    """Provides what a model learns from: batches, each in parts of equal weight, and the loss of one part."""

    def batch(self, progress: Progress, step_plan: TrainStep) -> Sequence[Part]:
        """Return the parts of the next step: a pure function of its arguments, so that a run can resume."""

    def size(self, part: Part) -> int:
        """Return how many tokens of the part are learnt from."""

    def loss(self, model: Qwen3ForCausalLM, part: Part, step_plan: TrainStep) -> Tensor:
        """Return the mean loss over the part's tokens."""


class TextLessons:
    """Plain next-token prediction on a mixture of texts."""

    def __init__(self, mixture: Mixture, plan: TrainPlan, device: str) -> None:
        self._mixture = mixture
        self._plan = plan
        self._device = device

    def batch(self, progress: Progress, step_plan: TrainStep) -> Sequence[Tensor]:
        """Return windows of the current length, as many as fill the batch."""
        count = self._plan.batch_tokens // step_plan.window
        rows = self._mixture.batch(progress.tokens // step_plan.window, count, step_plan.window)
        return pieces(torch.from_numpy(rows).to(self._device), max(1, self._plan.micro_tokens // step_plan.window))

    def size(self, part: Tensor) -> int:
        """Return the number of tokens that are predicted."""
        return part[:, 1:].numel()

    def loss(self, model: Qwen3ForCausalLM, part: Tensor, step_plan: TrainStep) -> Tensor:
        """Return the negative log-likelihood in nats per token."""
        return text_loss(model, part)


def train(model: Qwen3ForCausalLM, plan: TrainPlan, folder: Path, lessons: Lessons[Part]) -> Progress:
    """Train until the plan's time is up, saving to and resuming from ``folder``.

    An interrupt or SIGTERM saves and raises KeyboardInterrupt. Returns the final progress.
    """
    optimizers = optimizers_for(model, plan.muon_rate, plan.adam_rate, plan.weight_decay)
    progress = checkpoint.restore(folder, model, optimizers)
    report = Report(plan, progress)
    saved = time.monotonic()
    model.train()
    with signals_held() as stop:
        while True:
            began = time.monotonic()
            step_plan = schedule.next_step(plan, progress, schedule.requested_minutes(folder))
            if step_plan.finished or stop:
                break
            parts = lessons.batch(progress, step_plan)
            loss = _step(model, optimizers, lessons, parts, step_plan)
            progress.step += 1
            progress.tokens += sum(map(lessons.size, parts))
            progress.seconds += time.monotonic() - began
            report.step(progress, loss, step_plan)
            if time.monotonic() - saved > plan.save_seconds:
                checkpoint.save(folder, model, optimizers, progress)
                saved = time.monotonic()
        checkpoint.save(folder, model, optimizers, progress)
        if stop:
            raise KeyboardInterrupt(f"saved step {progress.step}; run the same command to go on")
    (folder / "progress.json").write_text(json.dumps(asdict(progress)), encoding="utf-8")
    return progress


def _step(
    model: Qwen3ForCausalLM,
    optimizers: list[torch.optim.Optimizer],
    lessons: Lessons[Part],
    parts: Sequence[Part],
    step_plan: TrainStep,
) -> float:
    total = 0.0
    for part in parts:
        loss = lessons.loss(model, part, step_plan) / len(parts)
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(model.parameters(), _GRADIENT_NORM)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * step_plan.rate
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return total


class Report:
    """Prints a line every few seconds: step, loss, rate, tokens per second, time left."""

    def __init__(self, plan: TrainPlan, progress: Progress, every_seconds: float = 20.0) -> None:
        self._plan = plan
        self._every = every_seconds
        self._losses: list[float] = []
        self._shown = time.monotonic()
        self._tokens = progress.tokens

    def step(self, progress: Progress, loss: float, step_plan: TrainStep) -> None:
        """Take note of one step, and print if it is time."""
        self._losses.append(loss)
        passed = time.monotonic() - self._shown
        if passed < self._every:
            return
        speed = (progress.tokens - self._tokens) / passed
        mean = sum(self._losses) / len(self._losses)
        end = self._plan.minutes * 60
        if progress.decay_began is not None:
            end = progress.decay_began + progress.decay_seconds
        print(
            f"step {progress.step:5d}  loss {mean:.4f}  rate {step_plan.rate:.3f}  {speed:6.0f} tokens/s  "
            f"{progress.tokens / 1e6:.2f}M tokens  {max(0.0, end - progress.seconds) / 60:.1f} min left",
            flush=True,
        )
        self._losses, self._shown, self._tokens = [], time.monotonic(), progress.tokens
