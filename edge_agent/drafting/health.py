"""How well a draft guesses on this device, and whether that is well enough to keep it."""

from __future__ import annotations

import enum
import math
from collections import deque
from dataclasses import dataclass

WINDOW = 256
"""Positions that a draft is judged by, the latest."""
_LEAST = 64
"""Positions before which nothing is said, and of which so many of the draft before must be known to compare with."""
_BOUND = 0.1
"""By how much the share of right guesses may fall: texts differ, and releases were compared on many before."""
_SIGMAS = 3.0
"""Standard errors of the difference that chance is granted beside it."""


@dataclass(frozen=True)
class HitRate:
    """First guesses of a draft at positions that came to be decided."""

    guessed: int = 0
    right: int = 0

    @property
    def share(self) -> float:
        return self.right / self.guessed if self.guessed else 0.0


class DraftHealth:
    """Of one draft on this device, through all its sessions. score: what was seen of it before.

    Not locked: workers' threads append, others count.
    """

    def __init__(self, score: HitRate | None = None) -> None:
        held = score or HitRate()
        self._hits: deque[bool] = deque([True] * held.right + [False] * (held.guessed - held.right), maxlen=WINDOW)
        self.failure = ""
        """What ended drafting in a session, or kept it from beginning; empty where nothing did."""

    def heard(self, right: bool) -> None:
        """The target's token at a position for which the draft had a first guess."""
        self._hits.append(right)

    def failed(self, reason: str) -> None:
        self.failure = reason

    @property
    def score(self) -> HitRate:
        hits = tuple(self._hits)
        return HitRate(len(hits), sum(hits))


class TrialVerdict(enum.Enum):
    EARLY = "too few positions to say"
    HEALTHY = "as good as the one before, as far as this device can tell"
    WORSE = "clearly worse than the one before"


def judge(before: HitRate, now: HitRate) -> TrialVerdict:
    """Of a release that is on trial. Where nothing is known of the one before, not failing is all that is asked."""
    if now.guessed < _LEAST:
        return TrialVerdict.EARLY
    if before.guessed >= _LEAST and before.share - now.share > _BOUND + _SIGMAS * _error(before, now):
        return TrialVerdict.WORSE
    return TrialVerdict.HEALTHY if now.guessed >= WINDOW else TrialVerdict.EARLY


def _error(one: HitRate, other: HitRate) -> float:
    """Standard error of the difference of two shares that are equal in truth."""
    share = (one.right + other.right) / (one.guessed + other.guessed)
    return math.sqrt(share * (1.0 - share) * (1.0 / one.guessed + 1.0 / other.guessed))
