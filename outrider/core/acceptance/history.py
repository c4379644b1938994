"""What became of a device's guesses, position by position: what predictions of its speed are made of.

A verdict is about the guesses for one position under the right predecessors, whether they came in time or not, and
whether they were evaluated or not: the target's token is known in the end. So a session that is too far away for its
guesses, or whose guesses are worth no row, goes on being judged.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

MISS, SIBLING, HIT, UNKNOWN = 0, 1, 2, 3
"""None of the guesses was right; another than the first was; the first was; nothing was guessed."""

_NOT_GUESSED = bytes([UNKNOWN])


class AcceptanceHistory:
    """Of the last positions of one session."""

    def __init__(self, position: int = 0, most: int = 256) -> None:
        """position: of the first token to come. most: positions that are kept, the latest."""
        self._end = position
        self._most = most
        self._kept = bytearray()
        self.positions = 0
        """From the first guess on that was judged since `restart`, also those without one: an unsure draft guesses
        less."""
        self.right = 0
        """Of them, those where the first guess was right."""
        self._counted_from: float = math.inf
        """Positions from here on count when they are settled; those before, when a late guess for them is judged."""

    def restart(self) -> None:
        """The device guesses with another draft from now on, which is counted from 0."""
        self.positions = self.right = 0
        self._counted_from = math.inf

    def settle(self, token: int, guesses: Iterable[int], counts: bool = True) -> None:
        """The next position's token is committed. guesses: those that were there, the first one first.

        counts: whether the first one came from the draft in use; such a position counts, as does one without a guess.
        """
        verdict = UNKNOWN
        for order, guess in enumerate(guesses):
            if guess == token:
                verdict = HIT if order == 0 else SIBLING
                break
            verdict = MISS
        self._kept.append(verdict)
        self._end += 1
        if verdict == UNKNOWN:
            self.positions += self._end > self._counted_from
        elif counts:
            self._count(verdict == HIT)
        if len(self._kept) > 2 * self._most:
            del self._kept[: -self._most]

    def late(self, position: int, right: bool) -> None:
        """A guess has come for a position whose token was committed before."""
        index = position - self._end + len(self._kept)
        if not 0 <= index < len(self._kept):
            return
        before = self._kept[index]
        if before == UNKNOWN:
            self._kept[index] = HIT if right else MISS
            if position < self._counted_from:
                self._count(right)
            else:
                self.right += right
        elif before == MISS and right:
            self._kept[index] = SIBLING

    def known(self) -> bytes:
        """Oldest first; positions for which nothing was guessed are left out."""
        return bytes(self._kept[-self._most :]).translate(None, _NOT_GUESSED)

    def _count(self, right: bool) -> None:
        self.positions += 1
        self.right += right
        self._counted_from = min(self._counted_from, self._end)
