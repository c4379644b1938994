"""Warm-up, constant, linear decay, driven by wall clock: a busy machine shortens a run, never spoils it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from models.recipe.checkpoint import Progress
from models.recipe.settings import TrainPlan
from outrider.artifacts import atomic_files

ORDER_FILE = "decay.json"


@dataclass(frozen=True)
class Verdict:
    """What the next step does."""

    rate: float
    """Multiple of the peak learning rate."""
    window: int
    share: float
    """Part of the planned time that has passed, 0 to 1."""
    finished: bool


def next_step(plan: TrainPlan, progress: Progress, ordered_minutes: float | None) -> Verdict:
    """Decide the next step; sets the beginning of the decay in ``progress`` when its time has come.

    ``ordered_minutes`` is the length of a decay that somebody asked for ahead of time, or None.
    """
    total = plan.minutes * 60
    share = min(1.0, progress.seconds / total)
    if progress.decay_began is None:
        if ordered_minutes is not None:
            progress.decay_began, progress.decay_seconds = progress.seconds, ordered_minutes * 60
        elif progress.seconds >= total * (1 - plan.decay_share):
            progress.decay_began, progress.decay_seconds = progress.seconds, total * plan.decay_share
    if progress.decay_began is None:
        return Verdict(min(1.0, (progress.step + 1) / plan.warmup_steps), plan.window, share, False)
    left = 1 - (progress.seconds - progress.decay_began) / progress.decay_seconds
    return Verdict(max(left, 0.0), plan.decay_window, share, left <= 0)


def order_decay(folder: Path, minutes: float) -> None:
    """Ask a running (or the next resumed) training in ``folder`` to decay now, within ``minutes``."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic_files.write(folder / ORDER_FILE, json.dumps({"minutes": minutes}).encode())


def ordered_minutes(folder: Path) -> float | None:
    """Return the length of the decay that was asked for, or None."""
    path = folder / ORDER_FILE
    return float(json.loads(path.read_text(encoding="utf-8"))["minutes"]) if path.exists() else None
