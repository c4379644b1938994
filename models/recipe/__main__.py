"""Command line of the recipe: run the stages in order, or ask a running one to finish early."""

from __future__ import annotations

import argparse
import ctypes
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

# OpenMP threads spin by default and starve whoever shares the machine; set before torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

from models.recipe import corpus, draft, evaluate, export, generate, heads, schedule, target, tokenizer
from models.recipe.settings import SCALES, Job, TrainPlan

# Parameters of mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

STAGES: dict[str, Callable[[Job], None]] = {
    "corpus": corpus.build,
    "tokenizer": tokenizer.build,
    "warm": draft.warm,
    "warm-narrow": draft.warm_narrow,
    "target": target.build,
    "generate": generate.build,
    "heads": heads.build,
    "draft": draft.distil,
    "draft-narrow": draft.distil_narrow,
    "export": export.build,
    "evaluate": evaluate.build,
}


HEADS_STAGES = ("corpus", "tokenizer", "generate", "heads")
"""What makes heads for a target that is there."""


def main(arguments: list[str] | None = None) -> None:
    """Run the chosen stages (all by default), order a decay, or publish the result."""
    options = _parser().parse_args(arguments)
    if options.command == "decay":
        schedule.request_decay(options.work / options.model, options.minutes)
        print(f"{options.model} will decay to the end within {options.minutes:g} minutes")
        return
    if options.command == "publish":
        export.publish(options.work, Path(__file__).parents[1])
        return
    job = _job(options)
    _keep_memory()
    torch.set_num_threads(job.threads)
    wanted: list[str] = options.stages if options.command == "run" else list(HEADS_STAGES)
    if options.command == "heads":
        heads.adopt(job, Path(__file__).parents[1] / "target")
    for name, build in STAGES.items():
        if wanted and name not in wanted:
            continue
        if (job.stage(name) / "done.json").exists():
            print(f"{name}: done before", flush=True)
            continue
        print(f"{name}: begins", flush=True)
        try:
            build(job)
        except KeyboardInterrupt as reason:
            raise SystemExit(f"{name}: stopped; {reason or 'run the same command to go on'}") from None


def _keep_memory() -> None:
    """Ask glibc to keep freed memory: mapping activations anew at every step costs a tenth of the time."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 1 << 30)


def _job(options: argparse.Namespace) -> Job:
    chosen = SCALES[options.scale]
    scale = replace(
        chosen,
        target_plan=_within(chosen.target_plan, options.target_minutes),
        warm_plan=_within(chosen.warm_plan, options.warm_minutes),
        heads=replace(chosen.heads, kind=options.heads_kind, minutes=options.heads_minutes or chosen.heads.minutes),
        distil=replace(
            chosen.distil,
            generate_minutes=options.generate_minutes or chosen.distil.generate_minutes,
            training=_within(chosen.distil.training, options.draft_minutes),
        ),
    )
    return Job(data=options.data, work=options.work, scale=scale, threads=options.threads, device=options.device)


def _within(plan: TrainPlan, minutes: float | None) -> TrainPlan:
    return plan if minutes is None else replace(plan, minutes=minutes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m models.recipe", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run the stages that are not done yet")
    only_heads = commands.add_parser("heads", help="train heads for the target that is in this folder's parent")
    for command in (run, only_heads):
        command.add_argument("--data", type=Path, required=True, help="directory that holds gsm8k_train.jsonl")
        command.add_argument("--work", type=Path, required=True, help="directory for checkpoints and results")
        command.add_argument("--scale", choices=sorted(SCALES), default="full")
        command.add_argument("--threads", type=int, default=2)
        command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
        command.add_argument("--target-minutes", type=float, help="training time of the target, decay included")
        command.add_argument("--warm-minutes", type=float, help="time of each draft's training on plain text")
        command.add_argument("--generate-minutes", type=float, help="time in which the target writes for the drafts")
        command.add_argument("--draft-minutes", type=float, help="time of each draft's distillation")
        command.add_argument("--heads-minutes", type=float, help="training time of the heads")
        text = "eagle: one layer that drafts token after token (default); medusa: a head for each position"
        command.add_argument("--heads-kind", choices=("eagle", "medusa"), default="eagle", help=text)
    run.add_argument("stages", nargs="*", metavar="STAGE", help=f"of {', '.join(STAGES)}; all by default")
    decay = commands.add_parser("decay", help="finish a running training early, with its decay")
    decay.add_argument("--work", type=Path, required=True)
    decay.add_argument("--model", default="target", help="stage to finish (default: target)")
    decay.add_argument("--minutes", type=float, default=12.0, help="length of the decay")
    publish = commands.add_parser("publish", help="copy models and model card into this folder's parent")
    publish.add_argument("--work", type=Path, required=True)
    return parser


if __name__ == "__main__":
    main()
