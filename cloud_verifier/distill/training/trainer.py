"""Train a student: steps, evaluations on validation text, checkpoints and the curve."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from cloud_verifier.distill.data.texts import TRAIN, VALIDATION, Text, load_texts
from cloud_verifier.distill.errors import PermanentFailure
from cloud_verifier.distill.training import checkpoint
from cloud_verifier.distill.training.batches import BatchSampler, TrainingBatch, micro_batches
from cloud_verifier.distill.training.checkpoint import BEST, STATE, TrainingProgress
from cloud_verifier.distill.training.heads_student import HeadsStudent
from cloud_verifier.distill.training.losses import loss
from cloud_verifier.distill.training.plan import LossKind, TrainingPlan
from cloud_verifier.distill.training.ranks import Ranks
from cloud_verifier.distill.training.student import Student

log = logging.getLogger(__name__)

_TOKEN_LAYERS = ("model.model.embed_tokens.", "model.lm_head.")
LOG_SECONDS = 10.0
"""Seconds between lines of the log."""


class DraftTrainer:
    """Trains a student in its run's folder, from its checkpoint on if there is one."""

    def __init__(self, folder: Path, plan: TrainingPlan, student: Student | HeadsStudent, ranks: Ranks) -> None:
        self._folder = folder
        self._plan = plan
        self._student = student.to(ranks.device)
        self._ranks = ranks
        self._precision = ranks.dtype(plan.precision)
        self._texts = load_texts(plan.dataset / TRAIN)
        self._validation = sample(load_texts(plan.dataset / VALIDATION), plan.measure_tokens)
        self._sampler = BatchSampler(self._texts, plan.batch_tokens, plan.seed)
        ranks.shard(student)
        self._optimizer = build_optimizer(student, plan)
        self.progress = self._restored() or TrainingProgress(plan.digest)
        # Step 0 is evaluated before any checkpoint: a run that was killed before its first one has left that line.
        self._curve = Curve(folder / "curve.jsonl", self.progress.step or -1) if ranks.leads else None
        self._saved = self._logged = time.monotonic()

    def run(self, stop: Callable[[], bool]) -> bool:
        """Train until the plan's end or until `stop()`, and save. Returns whether the end was reached."""
        now, plan = self.progress, self._plan
        self._student.train()
        if now.step == 0:
            self._evaluate()
        while True:
            stopped, seconds = self._ranks.broadcast([float(stop()), now.seconds])
            finished = plan.progress(now.step, seconds) >= 1
            if finished or stopped:
                break
            began = time.monotonic()
            self._step(plan.rate_at(now.step, seconds), plan.loss_at(now.step, seconds))
            now.seconds += time.monotonic() - began
            if now.step % plan.measure_steps == 0:
                self._evaluate()
            (due,) = self._ranks.broadcast([time.monotonic() - self._saved - plan.save_seconds])
            if due > 0:
                self._save()
        if finished and now.step % plan.measure_steps:
            self._evaluate()
        self._save()
        return finished

    def _step(self, rate: float, kind: LossKind) -> None:
        """Learn from one batch. Each position has the same weight, however texts and ranks divide them."""
        now, plan = self.progress, self._plan
        indices = self._sampler.batch(now.step)
        labels = sum(self._texts[index].label_count for index in indices)
        # A model's noise, if it has any, follows from seed, step and rank, so that no random state is saved.
        torch.manual_seed(hash((plan.seed, now.step, self._ranks.rank)))
        sums = torch.zeros(3, dtype=torch.float64, device=self._ranks.device)
        for group in micro_batches(self._texts, indices, plan.micro_tokens * self._ranks.size):
            sums += self._backward(group, kind, labels)
        torch.nn.utils.clip_grad_norm_(self._student.parameters(), plan.gradient_norm)
        for settings in self._optimizer.param_groups:
            settings["lr"] = rate * settings["share"]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        mean_loss, kl, overlap = (self._ranks.sum(sums) / labels).tolist()
        if not math.isfinite(mean_loss):
            raise PermanentFailure(f"the loss is {mean_loss} at step {now.step}: use a lower learning rate")
        now.step += 1
        now.tokens += labels
        now.overlap = overlap
        if self._curve and now.step % plan.report_steps == 0:
            self._curve.write(now, loss=mean_loss, kl=kl, overlap=overlap, rate=rate, validation_overlap=None)
        if self._ranks.leads and time.monotonic() - self._logged >= LOG_SECONDS:
            self._log(mean_loss, kl)

    def _backward(self, group: Sequence[int], kind: LossKind, labels: int) -> Tensor:
        """Add the gradients of a micro-batch; return the sums of loss, KL and overlap over this rank's positions."""
        has_texts, (kl, overlap, _) = _forward(self._student, self._texts, group, self._ranks, self._precision)
        losses = loss(kl, overlap, kind, self.progress.overlap, self._plan.eta)
        weight = float(has_texts)
        # FSDP averages the ranks' gradients, and these are parts of one sum.
        (losses.sum() * (weight * self._ranks.size / labels)).backward()  # type: ignore[no-untyped-call]
        return torch.stack([values.detach().double().sum() * weight for values in (losses, kl, overlap)])

    def _evaluate(self) -> None:
        """Measure the overlap on validation text, and keep the weights if they are the best so far."""
        began = time.monotonic()
        scores = evaluate(self._student, self._validation, self._ranks, self._plan.micro_tokens, self._precision)
        overlap, now = mean_overlap(scores), self.progress
        if now.step == 0:
            now.first_overlap = overlap
        if overlap > now.best_overlap:
            now.best_step, now.best_overlap = now.step, overlap
            tensors = checkpoint.gather(self._student)
            if self._ranks.leads:
                checkpoint.write(self._folder / "checkpoint" / BEST, tensors, now)
        now.seconds += time.monotonic() - began
        if self._curve:
            classes = {name: asdict(one) for name, one in scores.items()}
            self._curve.write(now, validation_overlap=overlap, validation=classes)
            shown = "  ".join(f"{name or 'default'} {one.overlap:.4f}" for name, one in scores.items())
            log.info("step %d  validation overlap %.4f  (%s)", now.step, overlap, shown)

    def _save(self) -> None:
        tensors = checkpoint.gather(self._student, self._optimizer)
        if self._ranks.leads:
            checkpoint.write(self._folder / "checkpoint" / STATE, tensors, self.progress)
        self._saved = time.monotonic()

    def _restored(self) -> TrainingProgress | None:
        path = self._folder / "checkpoint" / STATE
        found = checkpoint.restore(path, self._plan.digest, self._student, self._optimizer)
        if found is None:
            return None
        best = checkpoint.read_progress(self._folder / "checkpoint" / BEST)
        if best is not None and best.best_overlap > found.best_overlap:  # it was killed between the two files
            found.best_step, found.best_overlap = best.best_step, best.best_overlap
        if self._ranks.leads:
            log.info("going on from step %d", found.step)
        return found

    def _log(self, mean_loss: float, kl: float) -> None:
        now = self.progress
        done = self._plan.progress(now.step, now.seconds)
        speed, minutes_left = now.tokens / max(now.seconds, 1e-9), now.seconds * (1 - done) / done / 60
        log.info(
            "step %d  loss %.4f  kl %.4f  overlap %.4f  %.0f tokens/s  %.1f min left",
            *(now.step, mean_loss, kl, now.overlap, speed, minutes_left),
        )
        self._logged = time.monotonic()


def build_optimizer(student: Student | HeadsStudent, plan: TrainingPlan) -> torch.optim.Optimizer:
    """Return AdamW with a lower rate for embeddings and output layer.

    Every batch gives the rows of tokens that the traffic lacks a tiny gradient, which Adam scales up to a step as long
    as any other.
    """
    token_layers: list[Parameter] = []
    rest: list[Parameter] = []
    for name, parameter in checkpoint.trainable(student).items():
        (token_layers if name.startswith(_TOKEN_LAYERS) else rest).append(parameter)
    groups = [{"params": rest, "share": 1.0}, {"params": token_layers, "share": plan.token_rate_share}]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=plan.learning_rate,
        betas=(0.9, 0.95),
        eps=plan.adam_epsilon,
        weight_decay=plan.weight_decay,
    )


class Curve:
    """Appends to the file `curve.jsonl`: JSON lines in order of steps, one at a time."""

    def __init__(self, path: Path, step: int) -> None:
        """Drop torn lines, and lines beyond `step`, which a killed run wrote after its last checkpoint."""
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        path.write_text("".join(line + "\n" for line in lines if _is_whole(line, step)), encoding="utf-8")
        self._path = path

    def write(self, now: TrainingProgress, **values: Any) -> None:
        line = {"step": now.step, "seconds": round(now.seconds, 3), "tokens": now.tokens, **values}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _is_whole(line: str, step: int) -> bool:
    """Return whether a line is valid JSON, and of `step` at the latest."""
    try:
        return int(json.loads(line)["step"]) <= step
    except ValueError:
        return False


@dataclass(frozen=True)
class StudentScores:
    """Averages a student's predictions over the positions of one class."""

    overlap: float
    """sum min(p, q): the probability that a token drawn from the draft is accepted at temperature 1."""
    agreement: float
    """Share of positions where draft and target have the same likeliest token."""
    kl: float
    """KL(p || q) in nats."""


def mean_overlap(scores: Mapping[str, StudentScores]) -> float:
    """Return the mean over classes, all equal in weight, so that a rare class is not forgotten unseen."""
    return sum(one.overlap for one in scores.values()) / len(scores)


def sample(texts: Sequence[Text], tokens: int) -> list[Text]:
    """Return the first texts of each class, until they have `tokens` labels; at least one text of each."""
    taken: dict[str, int] = defaultdict(int)
    chosen = []
    for text in texts:
        if taken[text.traffic_class] < tokens:
            taken[text.traffic_class] += text.label_count
            chosen.append(text)
    return chosen


def evaluate(
    student: Student | HeadsStudent, texts: Sequence[Text], ranks: Ranks, max_tokens: int, precision: torch.dtype
) -> dict[str, StudentScores]:
    """Return the scores of each class, from forward passes of at most `max_tokens`. All ranks must call it."""
    classes = sorted({text.traffic_class for text in texts})
    sums = torch.zeros(len(classes), 4, dtype=torch.float64, device=ranks.device)
    student.eval()
    for number, name in enumerate(classes):
        indices = [index for index, text in enumerate(texts) if text.traffic_class == name]
        for group in micro_batches(texts, indices, max_tokens * ranks.size):
            with torch.no_grad():
                has_texts, (kl, overlap, agreed) = _forward(student, texts, group, ranks, precision)
            if has_texts:
                found = (overlap.sum(), agreed.sum(), kl.sum(), torch.tensor(len(kl)))
                sums[number] += torch.stack([value.double().to(ranks.device) for value in found])
    student.train()
    rows = ranks.sum(sums).tolist()
    return {
        name: StudentScores(*(value / row[3] for value in row[:3])) for name, row in zip(classes, rows, strict=True)
    }


def _forward(
    student: Student | HeadsStudent, texts: Sequence[Text], group: Sequence[int], ranks: Ranks, precision: torch.dtype
) -> tuple[bool, tuple[Tensor, Tensor, Tensor]]:
    """Run this rank's part of a micro-batch; return whether it has one, and what `Student.forward` returns.

    A rank without a text of its own runs another rank's, since the other ranks need its share of the weights.
    """
    mine = group[ranks.rank :: ranks.size]
    batch = TrainingBatch.of([texts[index] for index in mine or group[:1]], ranks.device)
    with torch.autocast(ranks.device.type, precision, enabled=precision != torch.float32):
        return bool(mine), student(batch)
