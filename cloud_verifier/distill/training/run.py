"""Trains a draft by a plan: `python -m cloud_verifier.distill.training.run RUN_DIR`, or the same under torchrun.

RUN_DIR/plan.json says what to do (`TrainingPlan`). Written there: `checkpoint/`, `curve.jsonl`, and at the end `model/`
(a Hugging Face folder: the best weights and the base's share), `adapter/` (peft, with LoRA) and `done.json`, whose
overlap is of the best weights alone. Killed at any moment, the
same command goes on from the last checkpoint; SIGTERM and SIGINT save one first.

Exit codes: 0 done, 143 (130) stopped by SIGTERM (SIGINT), 1 failed, 3 would fail alike again.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import logging
import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import torch
from pydantic import ValidationError
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from cloud_verifier.distill.gguf.importer import GgufRefused
from cloud_verifier.distill.job import HOPELESS
from cloud_verifier.distill.training import checkpoint
from cloud_verifier.distill.training.checkpoint import BEST, CheckpointRefused, Progress
from cloud_verifier.distill.training.lora import add_lora, merged, save_adapter
from cloud_verifier.distill.training.plan import TrainingPlan
from cloud_verifier.distill.training.ranks import Ranks
from cloud_verifier.distill.training.student import Student, load_base
from cloud_verifier.distill.training.trainer import Trainer, TrainingFailed
from outrider.artifacts import atomic_files

log = logging.getLogger(__name__)

DONE = "done.json"
_PR_SET_PDEATHSIG = 1


def train(folder: Path) -> int:
    """Run the plan in `folder` to its end or to a signal. Returns the exit code."""
    plan = TrainingPlan.read(folder)
    torch.set_num_threads(plan.threads)
    if (folder / DONE).exists():
        log.info("%s is already there", folder / DONE)
        return 0
    with _signals() as received, Ranks(plan.device) as ranks:
        student, _ = _student(plan)
        trainer = Trainer(folder, plan, student, ranks)
        if not trainer.run(stop=lambda: bool(received)):
            if ranks.leads:
                log.info("saved at step %d; the same command goes on from there", trainer.progress.step)
            return 128 + (received[0] if received else signal.SIGTERM)
        if ranks.leads:
            _finish(folder, plan, trainer.progress)
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m cloud_verifier.distill.training.run", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="RUN_DIR", help="folder with plan.json")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _end_with_torchrun()
    try:
        code = train(arguments.folder)
    except (TrainingFailed, CheckpointRefused, GgufRefused, ValidationError, OSError, ValueError) as error:
        log.error("training failed: %s", error)
        code = 1 if isinstance(error, OSError) else HOPELESS
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # At an ordinary exit a thread of gloo's that is still there aborts the process, one time in many.
        logging.shutdown()
        os._exit(code)
    sys.exit(code)


def _end_with_torchrun() -> None:
    """It gives each rank a session of its own, in which ranks would outlive it, were it killed outright (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:  # it was killed before that
            sys.exit(128 + signal.SIGKILL)


def _student(plan: TrainingPlan) -> tuple[Student, object | None]:
    """The student before any training, and peft's handle on its adapters if it has some."""
    model = load_base(plan.base)
    handle = add_lora(model, plan.lora_rank, plan.lora_alpha, plan.seed) if plan.lora_rank else None
    return Student(model), handle


def _finish(folder: Path, plan: TrainingPlan, progress: Progress) -> None:
    """Write the result as a model that is in one piece, and `done.json` last."""
    student, handle = _student(plan)
    before = {name: parameter.detach().clone() for name, parameter in student.named_parameters()}
    checkpoint.restore(folder / "checkpoint" / BEST, student, plan=plan.digest)
    model = student.model
    if handle is None:
        with torch.no_grad():
            for name, parameter in student.named_parameters():
                parameter.lerp_(before[name], plan.base_share)
    else:
        save_adapter(handle, _fresh(folder / "adapter"))
        model = merged(handle)
    model.save_pretrained(_fresh(folder / "model"))
    AutoTokenizer.from_pretrained(plan.tokenizer).save_pretrained(folder / "model")
    done = {
        "step": progress.step,
        "tokens": progress.tokens,
        "seconds": round(progress.seconds, 1),
        "heldout_overlap": {"before": progress.first_overlap, "best": progress.best_overlap},
        "best_step": progress.best_step,
        "model": "model",
        "adapter": "adapter" if handle is not None else None,
    }
    atomic_files.write(folder / DONE, json.dumps(done, indent=1).encode() + b"\n")
    log.info("done: held-out overlap %.4f, was %.4f", progress.best_overlap, progress.first_overlap)


def _fresh(folder: Path) -> Path:
    if folder.exists():
        shutil.rmtree(folder)
    return folder


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT, so that a step is never cut in half."""
    received: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        received.append(number)

    previous = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


if __name__ == "__main__":
    main()
