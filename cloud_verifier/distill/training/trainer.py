"""Train a draft, or heads, by the plan in a run's folder (`plan.json`, `TrainingPlan`).

The run writes `checkpoint/` there, and at its end `model/` (a Hugging Face folder with the mean of the best weights and
the base's; `heads.safetensors` if heads were trained) and `done.json`. Its validation overlap is that of the best
weights alone: the sum over tokens of min(p, q), with the target's p and the draft's q, as a mean over positions and
then over classes. After a kill `train` goes on from the last checkpoint.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from cloud_verifier.distill.run_folder import DONE, HEADS, MODEL, StageFailed
from cloud_verifier.distill.texts import TRAIN, VALIDATION, Text, load_texts
from cloud_verifier.distill.training import checkpoint
from cloud_verifier.distill.training.batches import BatchSampler, TrainingBatch, micro_batches
from cloud_verifier.distill.training.checkpoint import BEST, STATE, TrainingProgress
from cloud_verifier.distill.training.heads_student import HeadsStudent
from cloud_verifier.distill.training.losses import loss
from cloud_verifier.distill.training.plan import LossKind, Precision, TrainingPlan
from cloud_verifier.distill.training.student import Student, load_student
from cloud_verifier.engine.server_draft.head_models import save_heads
from outrider.artifacts import atomic_files

log = logging.getLogger(__name__)

_TOKEN_LAYERS = ("model.model.embed_tokens.", "model.lm_head.")
LOG_SECONDS = 10.0
"""Seconds between lines of the log."""
SAVE_S = 60.0
"""Seconds between checkpoints: the most training that a kill can lose."""
GRADIENT_NORM = 1.0
"""Norm to which gradients are clipped."""
_WITH_BFLOAT16 = ("AVX512", "SVE")
"""Beginnings of torch's names of instruction sets with which bfloat16 is not emulated. With AVX2 alone a product of 512
rows took five times as long in bfloat16 as in float32 (two cores of an AMD EPYC)."""


def train(folder: Path, stop: Callable[[], bool] = lambda: False) -> bool:
    """Run the plan in `folder` until its end or until `stop()`; return whether the end was reached.

    Raises StageFailed, OSError and ValueError.
    """
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    plan = TrainingPlan.read(folder)
    torch.set_num_threads(plan.threads)
    if (folder / DONE).exists():
        log.info("%s is already there", folder / DONE)
        return True
    trainer = DraftTrainer(folder, plan, load_student(plan))
    if not trainer.run(stop):
        log.info("saved at step %d; the same command goes on from there", trainer.progress.step)
        return False
    _finish(folder, plan, trainer.progress)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # a verifier may share the GPU
    return True


def _finish(folder: Path, plan: TrainingPlan, progress: TrainingProgress) -> None:
    """Write the resulting model, and `done.json` last."""
    student = load_student(plan)
    base = {name: parameter.detach().clone() for name, parameter in checkpoint.trainable(student).items()}
    checkpoint.restore(folder / "checkpoint" / BEST, plan.digest, student)
    new_heads = plan.heads is not None and not plan.base.is_file()  # which have no base to go on from
    if not new_heads and not plan.lora_rank:
        with torch.no_grad():
            for name, parameter in checkpoint.trainable(student).items():
                parameter.lerp_(base[name], plan.base_share)
    shutil.rmtree(folder / MODEL, ignore_errors=True)
    (folder / MODEL).mkdir()
    if isinstance(student, HeadsStudent):
        save_heads(folder / MODEL / HEADS, student.heads, student.target)
    else:
        student.merged().save_pretrained(folder / MODEL)
        AutoTokenizer.from_pretrained(plan.tokenizer).save_pretrained(folder / MODEL)
    done = {
        "step": progress.step,
        "tokens": progress.tokens,
        "seconds": round(progress.seconds, 1),
        "validation_overlap": {"before": progress.first_overlap, "best": progress.best_overlap},
        "best_step": progress.best_step,
    }
    atomic_files.write(folder / DONE, json.dumps(done, indent=1).encode() + b"\n")
    log.info("done: validation overlap %.4f, was %.4f", progress.best_overlap, progress.first_overlap)


class DraftTrainer:
    """Trains a student in its run's folder, from its checkpoint on if there is one."""

    def __init__(self, folder: Path, plan: TrainingPlan, student: Student | HeadsStudent) -> None:
        self._folder = folder
        self._plan = plan
        found = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(found if plan.device == "auto" else plan.device)
        self._student = student.to(self._device)
        self._precision = product_dtype(plan.precision, self._device)
        self._texts = load_texts(plan.dataset / TRAIN)
        self._validation = sample(load_texts(plan.dataset / VALIDATION), plan.measure_tokens)
        self._sampler = BatchSampler(self._texts, plan.batch_tokens, plan.seed)
        self._optimizer = build_optimizer(student, plan)
        path = folder / "checkpoint" / STATE
        restored = checkpoint.restore(path, plan.digest, student, self._optimizer)
        if restored is not None:
            log.info("going on from step %d", restored.step)
        self.progress = restored or TrainingProgress(plan.digest)
        self._saved = self._logged = time.monotonic()

    def run(self, stop: Callable[[], bool]) -> bool:
        """Train until the plan's end or until `stop()`, and save. Returns whether the end was reached."""
        now, plan = self.progress, self._plan
        self._student.train()
        if now.step == 0:
            self._evaluate()
        while True:
            progress = plan.progress(now.step, now.seconds)
            finished = progress >= 1
            if finished or stop():
                break
            began = time.monotonic()
            self._step(plan.rate_at(now.step, now.seconds), "kl" if progress < plan.kl_share else plan.loss)
            now.seconds += time.monotonic() - began
            if now.step % plan.measure_steps == 0:
                self._evaluate()
            if time.monotonic() - self._saved > SAVE_S:
                self._save()
        if finished and now.step % plan.measure_steps:
            self._evaluate()
        self._save()
        return finished

    def _step(self, rate: float, kind: LossKind) -> None:
        """Learn from one batch. Each position has the same weight, however texts divide them."""
        now, plan = self.progress, self._plan
        indices = self._sampler.batch(now.step)
        labels = sum(self._texts[index].label_count for index in indices)
        # A model's noise, if it has any, follows from seed and step, so that no random state is saved.
        torch.manual_seed(hash((plan.seed, now.step)))
        sums = torch.zeros(3, dtype=torch.float64, device=self._device)
        for group in micro_batches(self._texts, indices, plan.micro_tokens):
            sums += self._backward(group, kind, labels)
        torch.nn.utils.clip_grad_norm_(self._student.parameters(), GRADIENT_NORM)
        for settings in self._optimizer.param_groups:
            settings["lr"] = rate * settings["share"]
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        mean_loss, kl, overlap = (sums / labels).tolist()
        if not math.isfinite(mean_loss):
            raise StageFailed(f"the loss is {mean_loss} at step {now.step}: use a lower learning rate")
        now.step += 1
        now.tokens += labels
        now.overlap = overlap
        if time.monotonic() - self._logged >= LOG_SECONDS:
            self._log(mean_loss, kl)

    def _backward(self, group: Sequence[int], kind: LossKind, labels: int) -> Tensor:
        """Add the gradients of a micro-batch; return the sums of loss, KL and overlap over its positions."""
        kl, overlap = self._forward(self._texts, group)
        losses = loss(kl, overlap, kind, self.progress.overlap)
        (losses.sum() / labels).backward()  # type: ignore[no-untyped-call]
        return torch.stack([values.detach().double().sum() for values in (losses, kl, overlap)])

    def _evaluate(self) -> None:
        """Measure the overlap on validation text, and keep the weights if they are the best so far."""
        began = time.monotonic()
        scores, now = self._overlaps(), self.progress
        # All classes are equal in weight, so that a rare one is not forgotten unseen.
        overlap = sum(scores.values()) / len(scores)
        if now.step == 0:
            now.first_overlap = overlap
        if overlap > now.best_overlap:
            now.best_step, now.best_overlap = now.step, overlap
            checkpoint.write(self._folder / "checkpoint" / BEST, now, self._student)
        now.seconds += time.monotonic() - began
        shown = "  ".join(f"{name or 'default'} {one:.4f}" for name, one in scores.items())
        log.info("step %d  validation overlap %.4f  (%s)", now.step, overlap, shown)

    @torch.no_grad()
    def _overlaps(self) -> dict[str, float]:
        """Return the overlap on validation text of each class, as a mean over positions."""
        scores, texts = {}, self._validation
        self._student.eval()
        for name in sorted({text.traffic_class for text in texts}):
            indices = [index for index, text in enumerate(texts) if text.traffic_class == name]
            groups = micro_batches(texts, indices, self._plan.micro_tokens)
            scores[name] = float(torch.cat([self._forward(texts, group)[1].double() for group in groups]).mean())
        self._student.train()
        return scores

    def _forward(self, texts: Sequence[Text], group: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return KL and overlap, as `Student.forward` does, for the texts of a micro-batch."""
        batch = TrainingBatch.of([texts[index] for index in group], self._device)
        with torch.autocast(self._device.type, self._precision, enabled=self._precision != torch.float32):
            scores: tuple[Tensor, Tensor] = self._student(batch)
        return scores

    def _save(self) -> None:
        checkpoint.write(self._folder / "checkpoint" / STATE, self.progress, self._student, self._optimizer)
        self._saved = time.monotonic()

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
        weight_decay=plan.weight_decay,
        fused=True,
    )


def sample(texts: Sequence[Text], tokens: int) -> list[Text]:
    """Return the first texts of each class, until they have `tokens` labels; at least one text of each."""
    taken: dict[str, int] = defaultdict(int)
    chosen = []
    for text in texts:
        if taken[text.traffic_class] < tokens:
            taken[text.traffic_class] += text.label_count
            chosen.append(text)
    return chosen


def product_dtype(precision: Precision, device: torch.device) -> torch.dtype:
    """Return the type of matrix products on a device."""
    if precision != "auto":
        return torch.bfloat16 if precision == "bfloat16" else torch.float32
    emulated = device.type == "cpu" and not torch.backends.cpu.get_cpu_capability().startswith(_WITH_BFLOAT16)
    return torch.float32 if emulated else torch.bfloat16
