"""One training run: steps, measurements on text that is neither learnt from nor the gate's, checkpoints, the curve."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch.nn import Parameter

from cloud_verifier.distill.data import dataset
from cloud_verifier.distill.training import checkpoint
from cloud_verifier.distill.training.batches import Batch, Order, pieces
from cloud_verifier.distill.training.checkpoint import BEST, STATE, Progress
from cloud_verifier.distill.training.eval_student import Report, measure, sample
from cloud_verifier.distill.training.losses import Divergence, loss
from cloud_verifier.distill.training.plan import TrainingPlan
from cloud_verifier.distill.training.ranks import Ranks
from cloud_verifier.distill.training.schedule import Orders, orders, progress
from cloud_verifier.distill.training.student import Student

log = logging.getLogger(__name__)

_OF_TOKENS = ("model.model.embed_tokens.", "model.lm_head.")
LINE_SECONDS = 10.0
"""Between lines of the log."""


class TrainingFailed(RuntimeError):
    """The run cannot go on; says why."""


class Trainer:
    """Trains a student in its run's folder, from where the checkpoint there left off."""

    def __init__(self, folder: Path, plan: TrainingPlan, student: Student, ranks: Ranks) -> None:
        self._folder = folder
        self._plan = plan
        self._student = student.to(ranks.device)
        self._ranks = ranks
        self._precision = getattr(torch, plan.precision)
        self._texts = dataset.train(plan.dataset)
        self._heldout = sample(dataset.watched(plan.dataset), plan.measure_tokens)
        self._order = Order(self._texts, plan.batch_tokens, plan.seed)
        ranks.shard(student)
        self._optimizer = optimizer(student, plan)
        self.progress = self._restored() or Progress(plan.digest)
        # A run from its start measures first: a line of that is left of one that was killed before it saved.
        self._curve = Curve(folder / "curve.jsonl", self.progress.step or -1) if ranks.leads else None
        self._saved = self._said = time.monotonic()

    def run(self, stop: Callable[[], bool]) -> bool:
        """Train to the end of the plan, or until `stop()`; save. Returns whether the end was reached."""
        self._student.train()
        if self.progress.step == 0:
            self._measure()
        while True:
            stopped, seconds = self._ranks.of_leader([float(stop()), self.progress.seconds])
            todo = orders(self._plan, self.progress.step, seconds)
            if todo.finished or stopped:
                break
            began = time.monotonic()
            self._step(todo)
            self.progress.seconds += time.monotonic() - began
            if self.progress.step % self._plan.measure_steps == 0:
                self._measure()
            (due,) = self._ranks.of_leader([time.monotonic() - self._saved - self._plan.save_seconds])
            if due > 0:
                self._save()
        if todo.finished and self.progress.step % self._plan.measure_steps:
            self._measure()
        self._save()
        return todo.finished

    def _step(self, todo: Orders) -> None:
        """Learn from one batch. Each position weighs the same, however rows and ranks divide it."""
        indices = self._order.of_step(self.progress.step)
        learnt = sum(self._texts[index].learnt for index in indices)
        # Noise, where a model has any, follows from seed, step and rank: there is no generator's state to keep.
        torch.manual_seed(hash((self._plan.seed, self.progress.step, self._ranks.rank)))
        sums = torch.zeros(3, dtype=torch.float64, device=self._ranks.device)
        for group in pieces(self._texts, indices, self._plan.micro_tokens * self._ranks.size):
            sums += self._backward(group, todo, learnt)
        torch.nn.utils.clip_grad_norm_(self._student.parameters(), self._plan.gradient_norm)
        for settings in self._optimizer.param_groups:
            settings["lr"] = todo.rate * settings["share"]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        total, kl, overlap = (self._ranks.sum(sums) / learnt).tolist()
        if not math.isfinite(total):
            raise TrainingFailed(f"the loss is {total} at step {self.progress.step}: use a lower learning rate")
        self.progress.step += 1
        self.progress.tokens += learnt
        self.progress.overlap = overlap
        self._tell(todo, total, kl)

    def _backward(self, group: Sequence[int], todo: Orders, learnt: int) -> torch.Tensor:
        """Add a piece's gradients; return the sums of loss, KL and overlap over this rank's positions."""
        mine = group[self._ranks.rank :: self._ranks.size]
        batch = Batch.of([self._texts[index] for index in mine or group[:1]], self._ranks.device)
        with torch.autocast(self._ranks.device.type, self._precision, enabled=self._precision != torch.float32):
            kl, overlap, _ = self._student(batch)
        losses = loss(Divergence(kl, overlap), todo.loss, self.progress.overlap, self._plan.eta)
        # A rank without a text here takes part for the sake of the others: with a text that weighs nothing.
        weight = float(bool(mine))
        # The ranks' gradients are averaged, and these are parts of one sum.
        (losses.sum() * (weight * self._ranks.size / learnt)).backward()  # type: ignore[no-untyped-call]
        return torch.stack([values.detach().double().sum() * weight for values in (losses, kl, overlap)])

    def _measure(self) -> None:
        began = time.monotonic()
        report = measure(self._student, self._heldout, self._ranks, self._plan.micro_tokens, self._precision)
        now = self.progress
        if now.step == 0:
            now.first_overlap = report.overlap
        if report.overlap > now.best_overlap:
            now.best_step, now.best_overlap = now.step, report.overlap
            tensors = checkpoint.gather(self._student)
            if self._ranks.leads:
                checkpoint.write(self._folder / "checkpoint" / BEST, tensors, now)
        now.seconds += time.monotonic() - began
        if self._curve:
            self._curve.measured(now, report)
            classes = "  ".join(f"{name or 'default'} {one.overlap:.4f}" for name, one in report.classes.items())
            log.info("step %d  held-out overlap %.4f  (%s)", now.step, report.overlap, classes)

    def _save(self) -> None:
        tensors = checkpoint.gather(self._student, self._optimizer)
        if self._ranks.leads:
            checkpoint.write(self._folder / "checkpoint" / STATE, tensors, self.progress)
        self._saved = time.monotonic()

    def _restored(self) -> Progress | None:
        path = self._folder / "checkpoint" / STATE
        found = checkpoint.restore(path, self._student, self._optimizer, self._plan.digest)
        if found is None:
            return None
        best = checkpoint.progress_of(self._folder / "checkpoint" / BEST)
        if best is not None and best.best_overlap > found.best_overlap:  # killed after it, and before the next save
            found.best_step, found.best_overlap = best.best_step, best.best_overlap
        if self._ranks.leads:
            log.info("going on from step %d", found.step)
        return found

    def _tell(self, todo: Orders, total: float, kl: float) -> None:
        now = self.progress
        if self._curve is None:
            return
        if now.step % self._plan.report_steps == 0:
            self._curve.stepped(now, total, kl, todo.rate)
        if time.monotonic() - self._said >= LINE_SECONDS:
            done = progress(self._plan, now.step, now.seconds)
            left = now.seconds * (1 - done) / done
            speed = now.tokens / max(now.seconds, 1e-9)
            log.info(
                "step %d  loss %.4f  kl %.4f  overlap %.4f  %.0f tokens/s  %.1f min left",
                *(now.step, total, kl, now.overlap, speed, left / 60),
            )
            self._said = time.monotonic()


def optimizer(student: Student, plan: TrainingPlan) -> torch.optim.Optimizer:
    """AdamW. What belongs to tokens, embeddings and the output layer, learns at a rate of its own: to a token that the
    traffic lacks every batch gives a tiny gradient, which Adam makes as long a step of as of any other."""
    tokens: list[Parameter] = []
    others: list[Parameter] = []
    for name, parameter in checkpoint.trained(student).items():
        (tokens if name.startswith(_OF_TOKENS) else others).append(parameter)
    groups = [{"params": others, "share": 1.0}, {"params": tokens, "share": plan.token_rate_share}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=plan.learning_rate,
        betas=(0.9, 0.95),
        eps=plan.adam_epsilon,
        weight_decay=plan.weight_decay,
    )


class Curve:
    """`curve.jsonl`: a line of JSON every few steps, flushed, in order of steps."""

    def __init__(self, path: Path, step: int) -> None:
        """step: where the run goes on; lines beyond it are of a run that was killed after its checkpoint."""
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        path.write_text("".join(line + "\n" for line in lines if _is_before(line, step)), encoding="utf-8")
        self._path = path

    def stepped(self, now: Progress, total: float, kl: float, rate: float) -> None:
        self._write(now, loss=total, kl=kl, overlap=now.overlap, rate=rate, heldout_overlap=None)

    def measured(self, now: Progress, report: Report) -> None:
        classes = {name: asdict(one) for name, one in report.classes.items()}
        self._write(now, heldout_overlap=report.overlap, heldout=classes)

    def _write(self, now: Progress, **values: Any) -> None:
        line = {"step": now.step, "seconds": round(now.seconds, 3), "tokens": now.tokens, **values}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _is_before(line: str, step: int) -> bool:
    """Whether a line is whole, and of `step` at the latest."""
    try:
        return int(json.loads(line)["step"]) <= step
    except ValueError:
        return False
