"""Stand in for triton's kernels: the same quantities by numpy, in float32 as there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from outrider.core.coupling import gumbel


def race(logits: torch.Tensor, keys: torch.Tensor, temperatures: torch.Tensor, slack: float) -> Any:
    """Return what `triton_race.race` returns."""
    rows = [
        _raced(*row, slack) for row in zip(logits.float().numpy(), keys.tolist(), temperatures.tolist(), strict=True)
    ]
    names = ("tokens", "leads", "tops", "logits", "ranks", "near", "shares")
    return SimpleNamespace(**{name: [row[at] for row in rows] for at, name in enumerate(names)})


def _raced(x: np.ndarray[Any, Any], key: int, temperature: float, slack: float) -> tuple[Any, ...]:
    with np.errstate(invalid="ignore", over="ignore"):
        scores = x * np.float32(1.0 / temperature) + gumbel(key % 2**64, np.arange(len(x))).astype(np.float32)
        token = int(scores.argmax())
        second = np.delete(scores, token).max()
        weights = np.exp((x - x.max()).astype(np.float32) / np.float32(temperature))
        first = (x > x[token]) | ((x == x[token]) & (np.arange(len(x)) < token))
        near = (x != x[token]) & (abs(x - x[token]) <= slack * temperature)
        share = float(weights[first].sum() / weights.sum())
        lead = float(scores[token] - second)
    return token, lead, float(x.max()), float(x[token]), int(first.sum()), int(near.sum()), share
