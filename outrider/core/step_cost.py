"""What a forward pass of the target costs: seconds by rows and sessions, profiled first and refined by every step.

    t(n, m) = curve(n) + share * m

n query rows of m sessions; the curve is linear between knots, for a processor is flat while it waits for its memory and
steep once it computes, and the share holds what a session costs beside its rows: the attention over its prefix, mostly.
Fitted online by a Kalman filter (1960) whose state, the values at the knots and the share, may drift slowly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from outrider.core.errors import BadRequest

KNOTS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048)
"""Rows at which the curve has a value of its own."""
_NOISE = 0.1
"""By which share of its time a step differs from the next of the same shape."""
_DRIFT = 0.003
"""By which share of itself a value may change from step to step: prefixes grow, neighbours come and go."""
_UNKNOWN = 0.5
"""How wrong a value may be, as a share of it, before and however long it was not observed."""
_CLIP = 0.3
"""A step that took longer than predicted by more than this share of the prediction was disturbed; it counts as this."""

Floats = NDArray[np.float64]


class StepCost:
    """Predicts and learns. Not thread-safe.

    measured: rows -> seconds of steps of one session, at least one; what lies between and beyond is on the line through
    the two nearest. share_s: seconds per session beyond the first.
    """

    def __init__(self, measured: Mapping[int, float], share_s: float = 0.0) -> None:
        if not measured or min(measured) < 1 or min(measured.values()) <= 0.0:
            raise BadRequest("a step's cost needs at least one measurement of at least one row and over 0 s")
        share = min(max(0.0, share_s), 0.9 * min(measured.values()))
        self._rows = np.array(KNOTS, dtype=np.float64)
        # The state: seconds at each knot, then the share.
        self._state = np.append(_through(sorted(measured.items()), self._rows) - share, share)
        self._covariance = np.diag(self._widest())
        self.observed = 0
        """Steps that it has learned from."""

    def seconds(self, rows: int, sessions: int) -> float:
        """Of a step; more rows never cost less."""
        return float(self.curve(np.array([rows]), sessions)[0])

    def curve(self, rows: ArrayLike, sessions: int) -> Floats:
        """Seconds `[n]` of steps with these rows `[n]`."""
        wanted = np.asarray(rows, dtype=np.float64)
        values = np.maximum.accumulate(self._state[:-1])
        inside: Floats = np.interp(wanted, self._rows, values)
        slope = (values[-1] - values[-2]) / (self._rows[-1] - self._rows[-2])
        beyond: Floats = slope * np.maximum(0.0, wanted - self._rows[-1])
        return inside + beyond + self.share_s * sessions

    def observe(self, rows: int, sessions: int, seconds: float) -> None:
        """A step has taken so long."""
        expected = self.seconds(rows, sessions)
        error = min(max(seconds - expected, -_CLIP * expected), _CLIP * expected)
        reads = np.append(self._deciding(self._weights(rows)), float(sessions))
        spread = self._covariance @ reads
        gain = spread / (float(reads @ spread) + (_NOISE * expected) ** 2)
        self._state = np.maximum(self._state + gain * error, [*[1e-7] * len(KNOTS), 0.0])
        self._covariance -= np.outer(gain, spread)
        self._forget()
        self.observed += 1

    def _deciding(self, weights: Floats) -> Floats:
        """The weights on the knots whose values count: a knot below a smaller one is not read, and must not learn."""
        values = self._state[:-1]
        highest = np.maximum.accumulate(values)
        source = np.maximum.accumulate(np.where(values >= highest, np.arange(len(values)), 0))
        moved = np.zeros_like(weights)
        np.add.at(moved, source, weights)
        return moved

    def _forget(self) -> None:
        """Everything may have drifted since the last step; but no value is less certain than one never observed."""
        widest = self._widest()
        diagonal = self._covariance.diagonal() + _DRIFT**2 * widest / _UNKNOWN**2
        shrink = np.sqrt(np.minimum(1.0, widest / diagonal))
        np.fill_diagonal(self._covariance, diagonal)
        self._covariance *= shrink[:, None] * shrink

    def _widest(self) -> Floats:
        """Variance `[knots + 1]` of what is not known at all."""
        scale = np.append(self._state[:-1], max(self._state[-1], 0.02 * self._state[0]))
        return (_UNKNOWN * scale) ** 2

    def table(self, sessions: int = 1) -> dict[int, float]:
        """Rows -> seconds at the knots, for people and other processes."""
        return {rows: float(s) for rows, s in zip(KNOTS, self.curve(KNOTS, sessions), strict=True)}

    @property
    def share_s(self) -> float:
        """Seconds per session."""
        return float(self._state[-1])

    def _weights(self, rows: int) -> Floats:
        """How far each knot decides about so many rows; they sum to 1."""
        weights = np.zeros(len(self._rows))
        right = int(np.searchsorted(self._rows, min(max(rows, 1), KNOTS[-1])))
        left = max(0, right - 1)
        span = self._rows[right] - self._rows[left]
        part = (min(max(rows, 1), KNOTS[-1]) - self._rows[left]) / span if span else 1.0
        weights[left] = 1.0 - part
        weights[right] += part
        return weights


def _through(points: Sequence[tuple[int, float]], rows: Floats) -> Floats:
    """The values at `rows` on the lines through the points, the outermost lines prolonged, never falling."""
    x = np.array([n for n, _ in points], dtype=np.float64)
    y = np.maximum.accumulate(np.array([s for _, s in points]))
    values: Floats = np.interp(rows, x, y)
    if len(x) > 1:
        slope = (y[-1] - y[-2]) / (x[-1] - x[-2])
        values = values + slope * np.maximum(0.0, rows - x[-1])
    return values
