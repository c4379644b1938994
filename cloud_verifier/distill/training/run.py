"""Train a draft by a plan: `python -m cloud_verifier.distill.training.run RUN_DIR`.

RUN_DIR/plan.json is the plan (`TrainingPlan`). The run writes `checkpoint/` and `curve.jsonl` there, and at its end
`model/` (a Hugging Face folder with the mean of the best weights and the base's; `heads.safetensors` if heads were
trained), `adapter/` (peft's, with LoRA) and `done.json`, whose validation overlap is that of the best weights alone:
the sum over tokens of min(p, q), with the target's p and the draft's q, as a mean over positions and then over classes.
After a kill the same command goes on from the last checkpoint; SIGTERM and SIGINT save one first.

Exit codes: 0 done, 143 (130) stopped by SIGTERM (SIGINT), 1 failed, 3 failed for a reason that another try will meet
again.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from cloud_verifier.distill.errors import PermanentFailure
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
    """Run the plan in `folder` until its end or a signal. Returns the exit code."""
    plan = TrainingPlan.read(folder)
    torch.set_num_threads(plan.threads)
    if (folder / DONE).exists():
        log.info("%s is already there", folder / DONE)
        return 0
    with signals_held() as received:
        student, _ = load_student(plan)
        trainer = DraftTrainer(folder, plan, student)
        if not trainer.run(stop=lambda: bool(received)):
            log.info("saved at step %d; the same command goes on from there", trainer.progress.step)
            return 128 + (received[0] if received else signal.SIGTERM)
        _finish(folder, plan, trainer.progress)
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m cloud_verifier.distill.training.run", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="RUN_DIR", help="folder with plan.json")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        code = train(arguments.folder)
    except (PermanentFailure, OSError, ValueError) as error:
        log.error("training failed: %s", error)
        code = 1 if isinstance(error, OSError) else PermanentFailure.exit_status
    sys.exit(code)


def _finish(folder: Path, plan: TrainingPlan, progress: TrainingProgress) -> None:
    """Write the resulting model, and `done.json` last."""
    student, lora = load_student(plan)
    base = {name: parameter.detach().clone() for name, parameter in student.named_parameters()}
    checkpoint.restore(folder / "checkpoint" / BEST, plan.digest, student)
    if lora is None and not plan.begins_anew:
        with torch.no_grad():
            for name, parameter in student.named_parameters():
                parameter.lerp_(base[name], plan.base_share)
    if isinstance(student, HeadsStudent):
        _empty(folder / MODEL).mkdir()
        save_heads(folder / MODEL / HEADS, student.heads, student.target)
    else:
        model: Any = student.model
        if lora is not None:
            lora.save_pretrained(_empty(folder / "adapter"), safe_serialization=True)
            model = lora.merge_and_unload()
        model.save_pretrained(_empty(folder / MODEL))
        AutoTokenizer.from_pretrained(plan.tokenizer).save_pretrained(folder / MODEL)
    done = {
        "step": progress.step,
        "tokens": progress.tokens,
        "seconds": round(progress.seconds, 1),
        "validation_overlap": {"before": progress.first_overlap, "best": progress.best_overlap},
        "best_step": progress.best_step,
        "model": MODEL,
        "adapter": "adapter" if lora is not None else None,
    }
    atomic_files.write(folder / DONE, json.dumps(done, indent=1).encode() + b"\n")
    log.info("done: validation overlap %.4f, was %.4f", progress.best_overlap, progress.first_overlap)


def _empty(folder: Path) -> Path:
    if folder.exists():
        shutil.rmtree(folder)
    return folder


if __name__ == "__main__":
    main()
