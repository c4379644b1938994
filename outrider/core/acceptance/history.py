"""Record what became of a device's proposals, position by position, so that its speed can be predicted.

An outcome is about the proposals for one position after the right predecessors, whether or not they came in time and
whether or not they were evaluated: the target's token is known in the end. So a session whose proposals come too late,
or are not worth evaluating, goes on being measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

KEPT = 256
"""Positions whose outcomes are kept, the latest ones."""
MISS, SIBLING, HIT, UNKNOWN = 0, 1, 2, 3
"""No proposal was accepted; another than the first was; the first was; nothing was proposed."""


class AcceptanceHistory:
    """Records what became of the proposals at a session's latest positions.

    position: of the first token to come.
    """

    def __init__(self, position: int = 0) -> None:
        self._end = position
        self._kept = bytearray()
        self.positions = 0
        """Positions from the first one with a proposal since `restart`. Those without a proposal count too: a draft
        that is not sure proposes less."""
        self.first_accepted = 0
        """Number of these positions whose first proposal was accepted."""
        self._counted_from: float = math.inf
        """Positions from here on count when they are committed; earlier ones, when a late proposal for them comes."""

    def restart(self) -> None:
        """Count from 0, since the device proposes with another draft from now on."""
        self.positions = self.first_accepted = 0
        self._counted_from = math.inf

    def commit(self, token: int, proposals: Iterable[int], counts: bool = True) -> None:
        """Record that `token` was committed at the next position.

        proposals: the tokens that were proposed for it, the first one first. counts: whether the first came from the
        draft in use; the position counts then, as it does without any proposal.
        """
        outcome = UNKNOWN
        for order, proposed in enumerate(proposals):
            if proposed == token:
                outcome = HIT if order == 0 else SIBLING
                break
            outcome = MISS
        self._kept.append(outcome)
        self._end += 1
        if outcome == UNKNOWN:
            self.positions += self._end > self._counted_from
        elif counts:
            self._count(outcome == HIT)
        if len(self._kept) > 2 * KEPT:
            del self._kept[:-KEPT]

    def late(self, position: int, accepted: bool) -> None:
        """Record a proposal that came after the token at its position was committed."""
        index = position - self._end + len(self._kept)
        if not 0 <= index < len(self._kept):
            return
        before = self._kept[index]
        if before == UNKNOWN:
            self._kept[index] = HIT if accepted else MISS
            if position < self._counted_from:
                self._count(accepted)
            else:
                self.first_accepted += accepted
        elif before == MISS and accepted:
            self._kept[index] = SIBLING

    def outcomes(self, siblings: bool = True) -> bytes:
        """Return the outcomes, oldest first, without positions for which nothing was proposed.

        siblings: whether the target evaluates other proposals than the first; if not, an accepted one is a miss.
        """
        outcomes = bytes(self._kept[-KEPT:]).translate(None, bytes([UNKNOWN]))
        return outcomes if siblings else outcomes.replace(bytes([SIBLING]), bytes([MISS]))

    def _count(self, accepted: bool) -> None:
        self.positions += 1
        self.first_accepted += accepted
        self._counted_from = min(self._counted_from, self._end)
