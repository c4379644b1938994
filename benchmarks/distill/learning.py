"""Follow the loop while traffic changes: it must notice, train, survive a kill in the middle, and publish."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.distill.fleet import DeviceFleet, until
from benchmarks.distill.run_log import RunLog
from benchmarks.distill.size import HANG_S, DistillSize
from benchmarks.distill.system import DistillSystem
from cloud_verifier.distill.run_folder import DONE
from cloud_verifier.distill.state import RunOutcome
from outrider.core.errors import Unavailable

_STEPS_FIRST = 3
"""Training steps after the first checkpoint before the trainer is killed."""


@dataclass(frozen=True)
class TrainingCut:
    """Describe a training run that was killed."""

    at_step: int
    """Last step in its curve."""
    from_step: int
    """Step from which it resumed."""
    lost_s: float
    """Training time that was spent twice."""

    @classmethod
    def of(cls, before: Sequence[dict[str, Any]], from_step: int) -> TrainingCut:
        """Compare the curve at the kill, `before`, with the step that training resumed from."""
        return cls(int(before[-1]["step"]), from_step, lost_seconds(before, from_step))


async def turn(system: DistillSystem, fleet: DeviceFleet, scale: DistillSize, run_log: RunLog) -> int:
    """Ask for code until the loop knows what is usual, then for sums until it begins a run; returns its number."""
    fleet.order("code")
    run_log.log("eight devices ask for code")
    await until(lambda: "code" in system.state().usual, HANG_S, "the loop knows what is usual for code")
    usual = system.state().usual["code"]
    note = f"traffic turns to arithmetic after {fleet.tokens} tokens; usual on code: {usual:.2f}"
    turned = run_log.log(note, "arithmetic")
    fleet.order("arithmetic")
    await until(lambda: system.state().run is not None, HANG_S, "the loop notices")
    run = system.state().run
    if run is None:
        raise Unavailable("the run ended as soon as it had begun")
    noticed = run_log.log(f"the loop begins run {run.number} by itself: {run.cause}", "a run begins")
    run_log.check("the loop notices", "arithmetic is why", run.cause, "arithmetic" in run.cause)
    run_log.log(f"that took {noticed - turned:.0f} s of new traffic")
    return run.number


async def train(system: DistillSystem, number: int, scale: DistillSize, run_log: RunLog) -> None:
    """Wait for the training, kill it twice and wait for its end."""
    folder = system.run_folder(number)
    saved = folder / "checkpoint" / "state.safetensors"
    first = "the training's first checkpoint"
    await until(lambda: saved.exists() or any(one.number == number for one in system.state().history), HANG_S, first)
    if not saved.exists():
        raise Unavailable(f"the run ended before its training: {outcome(system.state().history)}")
    await _cut("the trainer", system.kill_trainer, folder, scale, run_log)
    await _cut("the loop", system.kill_loop, folder, scale, run_log)
    await until((folder / DONE).exists, HANG_S, "the training is over")
    done = json.loads((folder / DONE).read_text())
    run_log.log(
        f"trained: {done['step']} steps, {done['tokens']} tokens, {done['seconds']} s; {done['validation_overlap']}",
        "trained",
    )


async def _cut(
    what: str, kill: Callable[[], Awaitable[int]], folder: Path, scale: DistillSize, run_log: RunLog
) -> None:
    begin, log = last_step(folder), folder / "training.log"
    await until(lambda: last_step(folder) >= begin + _STEPS_FIRST or (folder / DONE).exists(), HANG_S, "some steps")
    if (folder / DONE).exists():
        raise Unavailable(f"the training ended, at step {last_step(folder)}, before {what} could be killed")
    before, begun = curve(folder), len(resumed(log))
    pid = await kill()
    run_log.log(f"kill -9 of {what} ({pid}) at step {before[-1]['step']} of {scale.steps}", f"{what} killed")
    await until(lambda: len(resumed(log)) > begun, HANG_S, "the training goes on")
    cut = TrainingCut.of(before, resumed(log)[-1])
    window = float(scale.training["save_seconds"])
    longest = max((b["seconds"] - a["seconds"] for a, b in itertools.pairwise(before)), default=0.0)
    run_log.log(f"it goes on by itself from step {cut.from_step}")
    run_log.check(
        f"{what}, killed in training",
        f"at most {window:.0f} s and a step or measurement ({longest:.1f} s) of training lost, and the loop goes on",
        f"{cut.at_step - cut.from_step} steps, {cut.lost_s:.1f} s",
        cut.from_step > 0 and cut.lost_s <= window + longest,
    )


async def published(system: DistillSystem, scale: DistillSize, run_log: RunLog) -> str:
    """Wait for the gate; return the digest of the release. Raises Unavailable if the gate refused it."""
    await until(lambda: _stage(system) in ("", "canary"), HANG_S, "the gate and the publishing")
    run = system.state().run
    if run is None:
        raise Unavailable(f"the run ended before its canary: {outcome(system.state().history)}")
    run_log.log(f"the gate let it pass; release {run.release[:12]} is published", "on trial")
    return run.release


async def decided(system: DistillSystem, scale: DistillSize, run_log: RunLog) -> RunOutcome:
    """Wait for the canary's decision."""
    await until(lambda: system.state().run is None, scale.canary_s + HANG_S, "the canary's decision")
    last = system.state().history[-1]
    run_log.log(f"release {last.release[:12]} is {last.result}: {last.reason}", last.result)
    return last


async def adopted(fleet: DeviceFleet, release: str, seconds: float, run_log: RunLog) -> float:
    """Wait until every device drafts with the release; return how many seconds that took."""
    began = asyncio.get_running_loop().time()
    await until(lambda: set(fleet.using().values()) == {release}, seconds, f"all devices draft with {release[:12]}")
    took = asyncio.get_running_loop().time() - began
    run_log.log(f"all devices draft with {release[:12]}")
    return took


def outcome(history: Sequence[RunOutcome]) -> str:
    """Return the result of the last run, in words."""
    return f"{history[-1].result}: {history[-1].reason}" if history else "there was none"


def curve(folder: Path) -> list[dict[str, Any]]:
    """Return the training's curve as far as it is written."""
    path = folder / "curve.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def last_step(folder: Path) -> int:
    lines = curve(folder)
    return int(lines[-1]["step"]) if lines else 0


def resumed(log: Path) -> list[int]:
    """Return the steps from which resumed trainings continued, as they logged them."""
    found = re.findall(r"going on from step (\d+)", log.read_text(errors="replace") if log.exists() else "")
    return [int(step) for step in found]


def lost_seconds(lines: Sequence[dict[str, Any]], step: int) -> float:
    """Return the seconds of training that a curve shows beyond `step`."""
    kept = [float(line["seconds"]) for line in lines if int(line["step"]) <= step]
    return float(lines[-1]["seconds"]) - max(kept, default=0.0) if lines else 0.0


def _stage(system: DistillSystem) -> str:
    run = system.state().run
    return run.stage if run else ""
