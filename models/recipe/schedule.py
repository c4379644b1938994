"""The learning-rate schedule: warm-up, a constant rate, then linear decay to zero.

It follows elapsed time, not steps, so that a busy machine takes fewer steps and still finishes its decay.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from models.recipe.checkpoint import Progress
from models.recipe.settings import TrainPlan
from outrider.artifacts import atomic_files

_REQUEST_FILE = "decay.json"


@dataclass(frozen=True)
class TrainStep:
    """Says how the next step trains."""

    rate: float
    """Multiple of the peak learning rate."""
    window: int
    share: float
    """Part of the planned time that has passed, 0 to 1."""
    finished: bool


def next_step(plan: TrainPlan, progress: Progress, requested_minutes: float | None) -> TrainStep:
    """Decide the next step, and set the beginning of the decay in ``progress`` once it is due.

    ``requested_minutes`` is the length of a decay requested ahead of time, or None.
    """
    total = plan.minutes * 60
    share = min(1.0, progress.seconds / total)
    if progress.decay_began is None:
        if requested_minutes is not None:
            progress.decay_began, progress.decay_seconds = progress.seconds, requested_minutes * 60
        elif progress.seconds >= total * (1 - plan.decay_share):
            progress.decay_began, progress.decay_seconds = progress.seconds, total * plan.decay_share
    if progress.decay_began is None:
        return TrainStep(min(1.0, (progress.step + 1) / plan.warmup_steps), plan.window, share, False)
    left = 1 - (progress.seconds - progress.decay_began) / progress.decay_seconds
    return TrainStep(max(left, 0.0), plan.decay_window, share, left <= 0)


def request_decay(folder: Path, minutes: float) -> None:
    """Ask a running (or the next resumed) training in ``folder`` to decay now, within ``minutes``."""
    folder.mkdir(parents=True, exist_ok=True)
    atomic_files.write(folder / _REQUEST_FILE, json.dumps({"minutes": minutes}).encode())


def requested_minutes(folder: Path) -> float | None:
    """Return the length of the decay that was requested, or None."""
    path = folder / _REQUEST_FILE
    return float(json.loads(path.read_text(encoding="utf-8"))["minutes"]) if path.exists() else None
