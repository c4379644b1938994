"""Predict the seconds of a verification step by its rows and sessions, profiled first and refined by every step.

    t(n, m) = curve(n) + share * m

A step has n query rows of m sessions. The curve is linear between knots: it is flat while the processor waits for its
memory and steep once it computes. The share is what a session costs beside its rows, mostly attention over its prefix.
Both are fitted online by a Kalman filter (1960), whose state, the values at the knots and the share, may drift slowly.
Values beyond a step's rows, up to a bound, sink towards those of fewer rows: a price that is too high keeps steps below
it, so that none would ever show it wrong. Sunk, it is tried, and a step or two correct it.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from outrider.core.errors import BadRequest

KNOTS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048)
"""The rows at which the curve has a value of its own."""
_NOISE = 0.1
"""The noise of one step, as a share of its time."""
_DRIFT = 0.003
"""The share of itself by which a value may change from step to step: prefixes grow, sessions come and go."""
_SINK = 1e-3
"""The part of its distance from the value of the next smaller knot that a value beyond a step loses by it."""
_SINKS_TO = 64
"""The most rows whose value sinks. Larger steps read prompts, which no price prevents."""
_PROFILED = 0.1
"""The greatest uncertainty of a profiled value, as a share of it: before the first step, and long after the last. A
slow first step of a size, for which kernels are prepared, does not outweigh it."""
_UNKNOWN = 0.5
"""The same for values that were not profiled but interpolated or extrapolated."""
_CLIP = 0.3
"""The greatest error that one step counts with, as a share of the prediction: a longer step was disturbed, if the next
ones are not."""
_DOUBT = 0.05
"""The uncertainty that such a step adds to the values it reads, as a share of them: a few in a row are believed."""

Floats = NDArray[np.float64]


class StepCost:
    """Predicts the seconds of one target's steps. It is not thread-safe.

    measured: rows -> seconds of steps of one session, at least one entry; other rows are interpolated or extrapolated
    linearly. share_s: seconds for each session beyond the first. Raises BadRequest for measurements that make no sense.
    """

    def __init__(self, measured: Mapping[int, float], share_s: float = 0.0) -> None:
        if not measured or min(measured) < 1 or min(measured.values()) <= 0.0:
            raise BadRequest("a step's cost needs at least one measurement of at least one row and over 0 s")
        share = min(max(0.0, share_s), 0.9 * min(measured.values()))
        self._rows = np.array(KNOTS, dtype=np.float64)
        # The state: seconds at each knot, then the share.
        known = np.array(sorted(measured.items()), dtype=np.float64)
        self._state = np.append(_through(known[:, 0], known[:, 1], self._rows) - share, share)
        self._unsure = np.append(np.where(np.isin(self._rows, known[:, 0]), _PROFILED, _UNKNOWN), _UNKNOWN)
        """The greatest uncertainty `[knots + 1]` of each value, as a share of it."""
        self._covariance = np.diag((self._unsure * self._scale()) ** 2)

    def seconds(self, rows: int, sessions: int) -> float:
        """Return the seconds of a step; more rows never cost less."""
        return float(self.curve(np.array([rows]), sessions)[0])

    def curve(self, rows: ArrayLike, sessions: int) -> Floats:
        """Return the seconds `[n]` of steps with these rows `[n]`."""
        return _through(self._rows, self._state[:-1], np.asarray(rows, dtype=np.float64)) + self.share_s * sessions

    def observe(self, rows: int, sessions: int, seconds: float) -> None:
        """Learn from the seconds that a step took."""
        expected = self.seconds(rows, sessions)
        error, most = seconds - expected, _CLIP * expected
        reads = np.append(self._effective(self._weights(rows)), float(sessions))
        spread = self._covariance @ reads
        gain = spread / (float(reads @ spread) + (_NOISE * expected) ** 2)
        self._state = np.maximum(self._state + gain * min(max(error, -most), most), [*[1e-7] * len(KNOTS), 0.0])
        if abs(error) > most:
            self._covariance += np.diag((reads > 0.0) * (_DOUBT * self._scale()) ** 2)
        else:
            self._covariance -= np.outer(gain, spread)
        self._forget(reads[:-1])

    def _effective(self, weights: Floats) -> Floats:
        """Move each weight to the knot whose value is read: a knot with a value below an earlier one is not."""
        values = self._state[:-1]
        highest = np.maximum.accumulate(values)
        source = np.maximum.accumulate(np.where(values >= highest, np.arange(len(values)), 0))
        moved = np.zeros_like(weights)
        np.add.at(moved, source, weights)
        return moved

    def _forget(self, reads: Floats) -> None:
        """Let values drift by a step, and those beyond it sink; none gets less certain than before the first step."""
        above = np.arange(1, len(reads)) > np.flatnonzero(reads).max(initial=0)
        sinks = above & (self._rows[1:] <= _SINKS_TO)
        self._state[1:-1] -= _SINK * sinks * np.maximum(0.0, np.diff(self._state[:-1]))
        greatest = (self._unsure * self._scale()) ** 2
        diagonal = self._covariance.diagonal() + (_DRIFT * self._scale()) ** 2
        shrink = np.sqrt(np.minimum(1.0, greatest / diagonal))
        np.fill_diagonal(self._covariance, diagonal)
        self._covariance *= shrink[:, None] * shrink

    def _scale(self) -> Floats:
        """Return what shares `[knots + 1]` of the values are taken of."""
        return np.append(self._state[:-1], max(self._state[-1], 0.02 * self._state[0]))

    def table(self, sessions: int = 1) -> dict[int, float]:
        """Return rows -> seconds at the knots, for logs and other processes."""
        return {rows: float(s) for rows, s in zip(KNOTS, self.curve(KNOTS, sessions), strict=True)}

    @property
    def share_s(self) -> float:
        """Return the seconds that each session adds beside its rows."""
        return float(self._state[-1])

    def _weights(self, rows: int) -> Floats:
        """Return the weight `[knots]` of each knot in the curve at so many rows; weights sum to 1."""
        weights = np.zeros(len(self._rows))
        right = int(np.searchsorted(self._rows, min(max(rows, 1), KNOTS[-1])))
        left = max(0, right - 1)
        span = self._rows[right] - self._rows[left]
        part = (min(max(rows, 1), KNOTS[-1]) - self._rows[left]) / span if span else 1.0
        weights[left] = 1.0 - part
        weights[right] += part
        return weights


def _through(x: Floats, y: Floats, wanted: Floats) -> Floats:
    """Return the values at `wanted` on the lines through the points, the last line extended, never falling."""
    y = np.maximum.accumulate(y)
    values: Floats = np.interp(wanted, x, y)
    if len(x) > 1:
        values = values + (y[-1] - y[-2]) / (x[-1] - x[-2]) * np.maximum(0.0, wanted - x[-1])
    return values
