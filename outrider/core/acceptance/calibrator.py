"""How likely a guess is to be the target's token, learned online from commits.

A draft proposes siblings in the order of their scores (log q + g, or log q where the target is greedy). A guess is
known by its rank among them, its margin (for the first, how far it is ahead of the second; for the others, how far they
are behind the first) and its depth below the last committed token when it was made. Acceptance is counted by (rank,
margin) and, within each, by depth: what a depth has shown weighs against what all depths have, and that against a prior
which is worth a few observations, so that an unknown draft is trusted as far as drafts usually can be, and no further
for long.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass

MARGIN_EDGES = (0.05, 0.15, 0.3, 0.5, 0.75, 1.0, 1.4, 1.9, 2.5, 3.3, 4.5, 6.0, 8.0, 11.0)
"""Upper edges of the margin buckets, in nats; the last bucket is open."""
DEPTH_EDGES = (1, 3)
"""Last depths of the depth classes; the last class is open."""

_RANKS = 4
"""Ranks that are told apart; greater ones share the last row."""
_PRIOR_WORTH = 6.0
"""Observations that the prior counts for, in each (rank, margin)."""
_POOL_WORTH = 20.0
"""Observations that all depths together count for, in each depth."""
_MEMORY = 400.0
"""Observations of one kind after which old ones fade: a draft's luck changes with the text."""
_SHARE = (0.0, 0.5, 0.3, 0.2)
"""Prior: what part of what siblings catch of the first guess's misses the guess of each rank catches."""
_LEAST_CAUGHT = 0.2
"""That a prior lets siblings catch: where none was sent none was right, whatever it was worth."""
_ENOUGH = 24.0
"""Positions after which a measurement from elsewhere counts as much as what drafts usually do."""
_STEEPNESS = 0.8
"""Prior: of the first guess's log odds over its margin in nats."""
_MOST = 0.97
"""Prior: no margin makes a guess more certain."""
_USUAL_MARGINS = (0.03, 0.03, 0.06, 0.07, 0.08, 0.07, 0.10, 0.10, 0.09, 0.10, 0.11, 0.08, 0.05, 0.03, 0.0)
"""How often a first guess's margin falls into each bucket, measured on the demo pair at temperature 0.8."""


@dataclass(frozen=True)
class AcceptancePrior:
    """The measured acceptance of recent sessions of the same kind."""

    first: float
    """Share of first proposals that were accepted."""
    sibling: float
    """Share of the remaining positions at which another proposal was accepted."""
    positions: int
    """Positions that both shares are taken over."""


@dataclass(slots=True)
class _Tally:
    """Guesses of one kind."""

    tried: float = 0.0
    accepted: float = 0.0

    def add(self, accepted: bool) -> None:
        if self.tried >= _MEMORY:
            self.tried *= 0.5
            self.accepted *= 0.5
        self.tried += 1.0
        self.accepted += accepted

    def share(self, expected: float, worth: float) -> float:
        """Accepted ones, with `worth` more of which the expected share was."""
        return (self.accepted + worth * expected) / (self.tried + worth)


class Calibrator:
    """Accept probabilities by (rank, margin, depth). One per draft and temperature class, shared by its sessions.

    Not locked: an observation that two threads make at once may be lost, and nothing else.
    """

    def __init__(self) -> None:
        self._prior = _prior(0.0, 1.0)
        self._pooled = [[_Tally() for _ in range(_BUCKETS)] for _ in range(_RANKS)]
        self._by_depth = [[[_Tally() for _ in range(_BUCKETS)] for _ in range(_RANKS)] for _ in range(_DEPTHS)]
        # Read far more often than it is learned: probability() is one look-up. [depth class][rank][bucket]
        self._table = [[list(row) for row in self._prior] for _ in range(_DEPTHS)]

    @property
    def observations(self) -> float:
        """How many guesses it has learned from, faded ones left out."""
        return sum(tally.tried for row in self._pooled for tally in row)

    def expect(self, first: float, caught: float, positions: int) -> None:
        """Start from what was measured of such guesses elsewhere. Nothing happens once more than that was learned here.

        first: share of first guesses that were right. caught: share of the others' positions at which a sibling was.
        positions: that this was measured at.
        """
        if self.observations > _PRIOR_WORTH * _RANKS * _BUCKETS:
            return
        trust = positions / (positions + _ENOUGH)
        self._prior = _prior(trust * _shift(first), 1.0 - trust * (1.0 - max(caught, _LEAST_CAUGHT)))
        for rank in range(_RANKS):
            for bucket in range(_BUCKETS):
                self._settle(rank, bucket)

    def probability(self, rank: int, margin: float, depth: int) -> float:
        """That a guess is accepted if its parent is.

        rank: 0 is the best sibling. margin: nats, its sign is ignored. depth: 1 follows the last committed token.
        """
        return self._table[_depth_class(depth)][min(rank, _RANKS - 1)][_bucket(margin)]

    def observe(self, rank: int, margin: float, depth: int, accepted: bool) -> None:
        """One guess whose parent was committed: whether the target's next token was this one. depth: as it was made."""
        row, bucket = min(rank, _RANKS - 1), _bucket(margin)
        self._pooled[row][bucket].add(accepted)
        self._by_depth[_depth_class(depth)][row][bucket].add(accepted)
        self._settle(row, bucket)

    def _settle(self, rank: int, bucket: int) -> None:
        """Work out what a (rank, margin) is worth at each depth."""
        pooled = self._pooled[rank][bucket].share(self._prior[rank][bucket], _PRIOR_WORTH)
        for table, tallies in zip(self._table, self._by_depth, strict=True):
            table[rank][bucket] = tallies[rank][bucket].share(pooled, _POOL_WORTH)


_BUCKETS = len(MARGIN_EDGES) + 1
_DEPTHS = len(DEPTH_EDGES) + 1


def _bucket(margin: float) -> int:
    return bisect.bisect_left(MARGIN_EDGES, abs(margin))


def _depth_class(depth: int) -> int:
    return bisect.bisect_left(DEPTH_EDGES, depth)


def _prior(shift: float, caught: float) -> list[list[float]]:
    """[rank][bucket]: a logistic curve for the first guess, and a share of what it misses for the others."""
    first = [_first(bucket, shift) for bucket in range(_BUCKETS)]
    return [first] + [[(1.0 - p) * caught * _SHARE[rank] for p in first] for rank in range(1, _RANKS)]


def _first(bucket: int, shift: float) -> float:
    """shift: of the log odds."""
    edges = (0.0, *MARGIN_EDGES, 1.5 * MARGIN_EDGES[-1])
    middle = (edges[bucket] + edges[bucket + 1]) / 2
    return min(_MOST, 1.0 / (1.0 + math.exp(-shift - _STEEPNESS * middle)))


def _shift(first: float) -> float:
    """The one at which so many first guesses are right, with margins as they usually are; by bisection."""
    low, high = -8.0, 8.0
    for _ in range(30):
        middle = (low + high) / 2
        right = sum(mass * _first(bucket, middle) for bucket, mass in enumerate(_USUAL_MARGINS))
        low, high = (middle, high) if right < first else (low, middle)
    return (low + high) / 2
