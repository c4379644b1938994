"""Train a draft, or heads, by the plan in a run's folder (`plan.json`, `TrainingPlan`), with transformers' Trainer.

The run writes `checkpoint/` there, and at its end `model/` (a Hugging Face folder with the mean of the best weights and
the base's; `heads.safetensors` if heads were trained) and `done.json`. The validation overlap in `done.json` is that of
the best weights alone: the sum over tokens of min(p, q), with the target's p and the draft's q, as a mean over
positions and then over classes. After a kill `train` goes on from the last checkpoint: its weights, its step, its time.
The optimizer's averages begin anew there, and the rate rises from zero as at first.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoTokenizer, PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.utils import SAFE_WEIGHTS_NAME
from transformers.utils import logging as transformers_logging

from cloud_verifier.distill.run_folder import DONE, HEADS, MODEL, StageFailed
from cloud_verifier.distill.texts import TRAIN, VALIDATION, Text, load_texts
from cloud_verifier.distill.training.heads_student import HeadsStudent
from cloud_verifier.distill.training.losses import loss
from cloud_verifier.distill.training.plan import TrainingPlan
from cloud_verifier.distill.training.student import load_student
from cloud_verifier.engine.server_draft.head_models import save_heads
from outrider.artifacts import atomic_files

log = logging.getLogger(__name__)

CHECKPOINTS, PROGRESS = "checkpoint", "progress.json"
LOG_S, SAVE_S = 10.0, 60.0
"""Seconds between lines of the log, and between checkpoints: the most training that a kill can lose."""
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
    trainer = DraftTrainer(folder / CHECKPOINTS, plan, stop)
    trainer.train(trainer.run.checkpoint)
    if not trainer.run.finished:
        log.info("saved at step %d; the same command goes on from there", trainer.state.global_step)
        return False
    _finish(folder, plan, trainer)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # a verifier may share the GPU
    return True


def _finish(folder: Path, plan: TrainingPlan, trainer: DraftTrainer) -> None:
    """Write the resulting model, and `done.json` last."""
    student, best = load_student(plan), trainer.state.best_global_step or 0
    # Adapters, and heads that begin at random, have no weights of the base to be averaged with.
    share = 0.0 if plan.lora_rank or (plan.heads is not None and not plan.base.is_file()) else plan.base_share
    if best:  # otherwise nothing was better than the base
        weights = load_file(folder / CHECKPOINTS / f"checkpoint-{best}" / SAFE_WEIGHTS_NAME)
        with torch.no_grad():
            for name, parameter in trainable(student).items():
                parameter.lerp_(weights[name], 1 - share)
    shutil.rmtree(folder / MODEL, ignore_errors=True)
    (folder / MODEL).mkdir()
    if isinstance(student, HeadsStudent):
        save_heads(folder / MODEL / HEADS, student.heads, student.target)
    else:
        student.merged().save_pretrained(folder / MODEL)
        AutoTokenizer.from_pretrained(plan.tokenizer).save_pretrained(folder / MODEL)
    before = next(entry["eval_overlap"] for entry in trainer.state.log_history if "eval_overlap" in entry)
    done = {
        "step": trainer.state.global_step,
        "seconds": round(trainer.run.seconds, 1),
        "validation_overlap": {"before": before, "best": trainer.state.best_metric},
        "best_step": best,
    }
    atomic_files.write(folder / DONE, json.dumps(done, indent=1).encode() + b"\n")
    log.info("done: validation overlap %.4f, was %.4f", trainer.state.best_metric, before)


class RunCallback(TrainerCallback):  # type: ignore[misc]
    """Ends a training in time, saves it once in a while, and logs."""

    def __init__(self, folder: Path, plan: TrainingPlan, stop: Callable[[], bool]) -> None:
        """folder: that of the checkpoints. The training's clock starts."""
        self._folder, self._plan, self._stop = folder, plan, stop
        saved = json.loads((folder / PROGRESS).read_bytes()) if (folder / PROGRESS).exists() else {}
        self._step = saved.get("step", 0)
        self.checkpoint = str(folder / f"checkpoint-{self._step}") if saved else None
        """Where the training goes on from, if anywhere."""
        self.finished = False
        self._saved = self._logged = time.monotonic()
        self._began: float = self._saved - saved.get("seconds", 0.0)

    @property
    def seconds(self) -> float:
        """Return the seconds of training and evaluation, over all resumes."""
        return time.monotonic() - self._began

    def progress(self, step: int) -> float:
        """Return the part of the run, from 0 to 1, that is over after `step` steps."""
        plan = self._plan
        return min(1.0, step / plan.steps if plan.steps is not None else self.seconds / (60 * (plan.minutes or 0.0)))

    def rate_factor(self, steps: int) -> float:
        """Return the factor of the learning rate, from 0 to 1, after so many steps of this process: warm-up, then
        constant, then linear decay to zero."""
        plan, left = self._plan, 1 - self.progress(self._step + steps)
        warmup = min(1.0, (steps + 1) / plan.warmup_steps) if plan.warmup_steps else 1.0
        return warmup * (min(1.0, left / plan.decay_share) if plan.decay_share else 1.0)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        now = time.monotonic()
        control.should_log = now - self._logged >= LOG_S
        control.should_save = now - self._saved >= SAVE_S
        if self.progress(state.global_step) >= 1:
            self.finished = control.should_training_stop = control.should_evaluate = True
        elif self._stop():
            control.should_training_stop = control.should_save = True
            control.should_evaluate = False  # which would decide itself whether to save

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: dict[str, float], **_: Any) -> None:
        if state.best_metric is None:  # before any training
            state.best_metric = metrics["eval_overlap"]

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        progress = {"step": state.global_step, "seconds": self.seconds}
        atomic_files.write(self._folder / PROGRESS, json.dumps(progress).encode())  # last: the checkpoint is whole
        self._saved = time.monotonic()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float], **_: Any) -> None:
        shown = {name: value for name, value in logs.items() if name in ("loss", "epoch") or "overlap" in name}
        text = "  ".join(f"{name.removeprefix('eval_')} {value:.4f}" for name, value in shown.items())
        log.info("step %d  %s  %.0f%% done", state.global_step, text, 100 * self.progress(state.global_step))
        self._logged = time.monotonic()


class DraftTrainer(Trainer):  # type: ignore[misc]
    """Trains a plan's student by our losses. Checkpoints are weights in safetensors, and JSON: nothing is pickled."""

    def __init__(self, folder: Path, plan: TrainingPlan, stop: Callable[[], bool]) -> None:
        texts, validation = (load_texts(plan.dataset / part) for part in (TRAIN, VALIDATION))
        student = load_student(plan)
        self.plan, self.run = plan, RunCallback(folder, plan, stop)  # now its clock starts
        rows, passes = passes_of(texts, plan)
        arguments = TrainingArguments(
            output_dir=str(folder),
            max_steps=plan.steps or 1 << 30,
            learning_rate=plan.learning_rate,
            weight_decay=plan.weight_decay,
            adam_beta2=0.95,
            per_device_train_batch_size=rows,
            per_device_eval_batch_size=rows,
            gradient_accumulation_steps=passes,
            bf16=in_bfloat16(plan),
            use_cpu=not torch.cuda.is_available(),
            seed=plan.seed,
            eval_strategy="steps",
            eval_steps=plan.measure_steps,
            eval_on_start=self.run.checkpoint is None,
            metric_for_best_model="overlap",
            save_strategy="best",
            save_total_limit=3,  # the best, the last, and the one before, which a kill may leave as the last whole one
            save_only_model=True,
            logging_strategy="no",  # `RunCallback` says when
        )
        arguments._n_gpu = min(arguments.n_gpu, 1)  # other GPUs are for others
        super().__init__(
            student,
            arguments,
            collate,
            texts,
            validation,
            compute_metrics=lambda measured: overlaps(validation, measured.predictions),
            callbacks=[self.run],
        )
        self.remove_callback(PrinterCallback)

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss of a forward pass, as its part of the mean over all labels of the step."""
        sums = model(**inputs)
        mean = loss(sums, self.plan.loss) / num_items_in_batch
        if not mean.isfinite():
            raise StageFailed(f"the loss is {mean:.3g} at step {self.state.global_step}: use a lower learning rate")
        return (mean, {"sums": sums}) if return_outputs else mean

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        self.lr_scheduler = LambdaLR(self.optimizer, self.run.rate_factor)
        return self.lr_scheduler

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(trainable(self.model), folder / SAFE_WEIGHTS_NAME)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        self.model.load_state_dict(load_file(Path(resume_from_checkpoint) / SAFE_WEIGHTS_NAME), strict=False)


def trainable(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return the weights that are trained, by name."""
    return {name: weight.detach() for name, weight in module.named_parameters() if weight.requires_grad}


def collate(texts: Sequence[Text]) -> dict[str, Tensor]:
    """Return texts, each without its last token, as a batch padded at the end, where causal attention never looks.

    `input_ids` and `labels`, the next token or -100, are `[b, L]`; so is `tail`, and `top_ids` and `top_log_probs` are
    `[b, L, K]`: the target's distribution of the label.
    """
    pad = partial(pad_sequence, batch_first=True)
    labels = [np.where(np.arange(1, len(one.tokens)) < one.first, -100, one.tokens[1:]) for one in texts]
    return {
        "input_ids": pad([torch.from_numpy(one.tokens[:-1]).long() for one in texts]),
        "labels": pad([torch.from_numpy(one).long() for one in labels], padding_value=-100),
        "top_ids": pad([torch.from_numpy(one.top_ids[1:]).long() for one in texts]),
        "top_log_probs": pad([torch.from_numpy(one.top_log_probs[1:]) for one in texts]),
        "tail": pad([torch.from_numpy(one.tail[1:]) for one in texts]),
    }


def passes_of(texts: Sequence[Text], plan: TrainingPlan) -> tuple[int, int]:
    """Return the texts of a forward pass and the passes of a step, so that a step has about `batch_tokens` labels."""
    longest = max(len(text.tokens) for text in texts) - 1
    texts_per_step = min(len(texts), plan.batch_tokens * len(texts) / sum(text.label_count for text in texts))
    passes = math.ceil(texts_per_step / max(1, plan.micro_tokens // longest))
    return max(1, round(texts_per_step / passes)), passes


def overlaps(texts: Sequence[Text], sums: Any) -> dict[str, float]:
    """Return the overlap of each class, as a mean over positions, and of all. sums: `[n, 3]`, those of n texts.

    All classes are equal in weight, so that a rare one is not forgotten unseen.
    """
    by_class: dict[str, Any] = defaultdict(lambda: np.zeros(3))
    for text, row in zip(texts, sums, strict=True):
        by_class[text.traffic_class] += row
    found = {f"overlap_{name or 'default'}": overlap / count for name, (count, _, overlap) in sorted(by_class.items())}
    return {"overlap": sum(found.values()) / len(found), **found}


def in_bfloat16(plan: TrainingPlan) -> bool:
    """Return whether matrix products are in bfloat16."""
    if plan.precision != "auto":
        return plan.precision == "bfloat16"
    return torch.cuda.is_available() or torch.backends.cpu.get_cpu_capability().startswith(_WITH_BFLOAT16)
