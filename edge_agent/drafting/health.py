"""Count how often a draft's first proposals are accepted on this device, and compare two drafts by that."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import Literal

WINDOW = 256
"""The latest positions, by which a draft is judged."""
_LEAST = 64
"""Positions below which a draft is not judged, the one on trial as well as the one before it."""
_MARGIN = 0.1
"""By how much the share may fall: texts differ, and releases were compared on many texts before."""
_SIGMAS = 3.0
"""Standard errors of the difference that are tolerated on top of the margin."""


@dataclass(frozen=True)
class FirstAcceptance:
    """Counts the positions at which a draft was asked, whether it proposed or not, and those where it was right."""

    proposed: int = 0
    accepted: int = 0

    @property
    def share(self) -> float:
        """Return the fraction that was accepted; 0 where the draft was not asked."""
        return self.accepted / self.proposed if self.proposed else 0.0


class DraftHealth:
    """Counts what became of a draft's first proposals in all its sessions, and keeps its last failure.

    past: what was counted earlier. It is not locked: workers' threads append, other threads read.
    """

    def __init__(self, past: FirstAcceptance | None = None) -> None:
        accepted, proposed = (past.accepted, past.proposed) if past else (0, 0)
        self._outcomes = deque([True] * accepted + [False] * (proposed - accepted), maxlen=WINDOW)
        self.failure = ""
        """The error that ended drafting in a session, or kept it from beginning; empty where there was none."""

    def count(self, accepted: bool) -> None:
        """Count a position at which the draft was asked and the target's token became known."""
        self._outcomes.append(accepted)

    def failed(self, reason: str) -> None:
        """Record why the draft failed."""
        self.failure = reason

    @property
    def first_acceptance(self) -> FirstAcceptance:
        """Return the counts of the latest `WINDOW` positions."""
        outcomes = tuple(self._outcomes)
        return FirstAcceptance(len(outcomes), sum(outcomes))


def judge(before: FirstAcceptance, now: FirstAcceptance) -> Literal["early", "healthy", "worse"]:
    """Compare a release on trial with the draft before it.

    Returns "worse" where it clearly is, "healthy" after a whole window of positions, "early" before. Where the draft
    before is unknown, the release only must not fail.
    """
    if now.proposed < _LEAST:
        return "early"
    if before.proposed >= _LEAST:
        # The standard error of the difference of two shares under the hypothesis that they are equal.
        share = (before.accepted + now.accepted) / (before.proposed + now.proposed)
        error = math.sqrt(share * (1.0 - share) * (1.0 / before.proposed + 1.0 / now.proposed))
        if before.share - now.share > _MARGIN + _SIGMAS * error:
            return "worse"
    return "healthy" if now.proposed >= WINDOW else "early"
