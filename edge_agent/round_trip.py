"""The way to the verifier and back, estimated from nodes sent and the Commits that report them as seen."""

from __future__ import annotations

from collections import deque

_SAMPLES = 16
_ENOUGH = 4
"""Samples before the estimate is believed: a single one may have waited for two steps."""


class RoundTrip:
    """Waiting for a step to begin only ever adds to a sample, so the least of the recent ones is the estimate."""

    def __init__(self) -> None:
        self._samples: deque[float] = deque(maxlen=_SAMPLES)
        self._probe: tuple[int, float] | None = None

    @property
    def seconds(self) -> float:
        """0 where too little is known yet."""
        return min(self._samples) if len(self._samples) >= _ENOUGH else 0.0

    def sent(self, last_id: int, now: float) -> None:
        """An Append went out whose last node has this id."""
        if self._probe is None:
            self._probe = (last_id, now)

    def seen(self, seen: int, now: float, step_s: float) -> bool:
        """A Commit reports ids up to `seen`, after a step of `step_s`; True where that made a sample."""
        if self._probe is None or seen < self._probe[0]:
            return False
        self._samples.append(max(0.0, now - self._probe[1] - step_s))
        self._probe = None
        return True
