"""Judge predicted probabilities: the reliability curve, its error and its skill.

Bins hold equally many predictions, so that each point of the curve is equally sure. The expected calibration error is
the mean distance between what a bin predicted and what happened in it (Naeini et al., 2015; equal-mass bins after
Nguyen and O'Connor, 2015). The skill compares the Brier score with that of always predicting the share that happened:
a prediction may be calibrated and say nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Reliability:
    """Measure how well a set of predictions is calibrated."""

    error: float
    """Expected calibration error, 0..1."""
    skill: float
    """1 - Brier score / Brier score of the base rate: at most 1; above 0 where a prediction says more than the rate."""
    curve: tuple[tuple[float, float, int], ...]
    """Per bin, in rising order: mean predicted, share that happened, predictions."""


def reliability(predicted: Sequence[float], happened: Sequence[bool], bins: int = 10) -> Reliability:
    """Measure how far `predicted` probabilities agree with the outcomes.

    Raises ValueError where there are fewer predictions than bins, or not one outcome for each.
    """
    if len(predicted) != len(happened) or not 1 <= bins <= len(predicted):
        raise ValueError(f"{len(predicted)} predictions and {len(happened)} outcomes for {bins} bins")
    forecast, came = np.asarray(predicted, np.float64), np.asarray(happened, np.float64)
    order = np.argsort(forecast, kind="stable")
    parts = np.array_split(order, bins)
    curve = tuple((float(forecast[part].mean()), float(came[part].mean()), len(part)) for part in parts)
    error = sum(abs(mean - share) * count for mean, share, count in curve) / len(forecast)
    base = float(came.mean() * (1.0 - came.mean()))
    brier = float(np.square(forecast - came).mean())
    return Reliability(error, 1.0 - brier / base if base else 0.0, curve)
