"""Train a draft, or heads, by the plan in a run's folder (`plan.json`, `TrainingPlan`).

The run writes `checkpoint/` there, and at its end `model/` (a Hugging Face folder with the mean of the best weights and
the base's; `heads.safetensors` if heads were trained) and `done.json`. Its validation overlap is that of the best
weights alone: the sum over tokens of min(p, q), with the target's p and the draft's q, as a mean over positions and
then over classes. After a kill `train` goes on from the last checkpoint; SIGTERM and SIGINT save one first.
"""

from __future__ import annotations

import json
import logging
import shutil
import signal
from pathlib import Path

import torch
from transformers import AutoTokenizer

from cloud_verifier.distill.run_folder import DONE, HEADS, MODEL
from cloud_verifier.distill.training import checkpoint
from cloud_verifier.distill.training.checkpoint import BEST, TrainingProgress
from cloud_verifier.distill.training.heads_student import HeadsStudent
from cloud_verifier.distill.training.plan import TrainingPlan
from cloud_verifier.distill.training.student import load_student
from cloud_verifier.distill.training.trainer import DraftTrainer
from cloud_verifier.engine.server_draft.head_models import save_heads
from outrider.artifacts import atomic_files
from outrider.processes import signals_held

log = logging.getLogger(__name__)


def train(folder: Path) -> int:
    """Run the plan in `folder` until its end, and return 0, or until a signal: 143 for SIGTERM, 130 for SIGINT.

    Raises PermanentFailure, OSError and ValueError.
    """
    plan = TrainingPlan.read(folder)
    torch.set_num_threads(plan.threads)
    if (folder / DONE).exists():
        log.info("%s is already there", folder / DONE)
        return 0
    with signals_held() as received:
        trainer = DraftTrainer(folder, plan, load_student(plan))
        if not trainer.run(stop=lambda: bool(received)):
            log.info("saved at step %d; the same command goes on from there", trainer.progress.step)
            return 128 + (received[0] if received else signal.SIGTERM)
        _finish(folder, plan, trainer.progress)
    return 0


def _finish(folder: Path, plan: TrainingPlan, progress: TrainingProgress) -> None:
    """Write the resulting model, and `done.json` last."""
    student = load_student(plan)
    base = {name: parameter.detach().clone() for name, parameter in checkpoint.trainable(student).items()}
    checkpoint.restore(folder / "checkpoint" / BEST, plan.digest, student)
    if not plan.begins_anew:
        with torch.no_grad():
            for name, parameter in checkpoint.trainable(student).items():
                parameter.lerp_(base[name], plan.base_share)
    if isinstance(student, HeadsStudent):
        _empty(folder / MODEL).mkdir()
        save_heads(folder / MODEL / HEADS, student.heads, student.target)
    else:
        student.model.save_pretrained(_empty(folder / MODEL))
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


def _empty(folder: Path) -> Path:
    if folder.exists():
        shutil.rmtree(folder)
    return folder
