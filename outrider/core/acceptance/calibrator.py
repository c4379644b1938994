"""Estimate how likely a proposal is to be the target's token, learned online on the device from commits.

A draft proposes siblings in the order of their scores (log q + g, or log q if the target is greedy). A proposal is
described by its rank among them, its margin (how far the best is ahead of the second, or how far another one is behind
the best), its depth below the last committed token when it was made, and, where several sources propose tokens, what
the better ones say of it. Acceptance is counted by (agreement, rank, margin), and within each by depth. The counts of a
depth are weighed against those of all depths, and these against a prior, which counts as a few observations: an unknown
draft is trusted as far as drafts usually can be, and only for a short time.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from enum import IntEnum

from outrider.wire.v1.coordinator_pb2 import Prior

MARGIN_EDGES = (0.05, 0.15, 0.3, 0.5, 0.75, 1.0, 1.4, 1.9, 2.5, 3.3, 4.5, 6.0, 8.0, 11.0)
"""Upper edges of the margin buckets, in nats; the last bucket is open."""
DEPTH_EDGES = (1, 3)
"""Last depths of the depth classes; the last class is open."""

_RANKS = 4
"""Ranks with estimates of their own; greater ones share the last."""
_PRIOR_WEIGHT = 6.0
"""Observations that the prior counts as, in each (rank, margin)."""
_POOL_WEIGHT = 20.0
"""Observations that all depths together count as, in each depth."""
_MEMORY = 400.0
"""Observations of one kind after which old ones count half: acceptance changes with the text."""
_SIBLING_SHARE = (0.0, 0.5, 0.3, 0.2)
"""Prior: of the positions at which some sibling is accepted after the best proposal missed, the share of each rank."""
_MIN_SIBLING = 0.2
"""The least that a prior assumes of siblings: where none was sent, none was accepted, whatever its probability."""
_AGREEMENT_SHARE = (1.0, 1.0, 0.3, 0.15)
"""Prior: acceptance by agreement, over that where no better source was asked."""
_TRUST_POSITIONS = 24.0
"""Positions after which a prior measured elsewhere counts as much as the acceptance of usual drafts."""
_STEEPNESS = 0.8
"""Prior: log odds of the best proposal for each nat of its margin."""
_MAX_PRIOR = 0.97
"""Prior: no margin makes a proposal more certain than this."""
_USUAL_MARGINS = (0.03, 0.03, 0.06, 0.07, 0.08, 0.07, 0.10, 0.10, 0.09, 0.10, 0.11, 0.08, 0.05, 0.03, 0.0)
"""The share of best proposals in each margin bucket, measured on a draft of 1.6 million weights at temperature 0.8."""


class Agreement(IntEnum):
    """Tells what the better sources propose in a proposal's place."""

    UNKNOWN = 0
    """No better source was asked."""
    FIRST = 1
    """One of them has the token as its first proposal."""
    LATER = 2
    """One of them has the token, but none has it first."""
    MISSING = 3
    """They propose other tokens."""


@dataclass(slots=True)
class _Tally:
    """The counts of one kind of proposal, of which old ones fade."""

    tried: float = 0.0
    accepted: float = 0.0

    def add(self, accepted: bool) -> None:
        if self.tried >= _MEMORY:
            self.tried *= 0.5
            self.accepted *= 0.5
        self.tried += 1.0
        self.accepted += accepted

    def share(self, expected: float, weight: float) -> float:
        """Return the accepted share, with the expected one counting as `weight` further observations."""
        return (self.accepted + weight * expected) / (self.tried + weight)


class Calibrator:
    """Estimates acceptance by (agreement, rank, margin, depth); each source and temperature class has one.

    Its sessions share it without a lock: an observation that two threads make at once may be lost, and nothing else.
    """

    def __init__(self) -> None:
        self._prior = _prior(0.0, 1.0)
        self._pooled = [[_Tally() for _ in range(_BUCKETS)] for _ in range(_ROWS)]
        self._by_depth = [[[_Tally() for _ in range(_BUCKETS)] for _ in range(_ROWS)] for _ in range(_DEPTHS)]
        # It is read far more often than it learns, so probability() is one look-up. [depth class][row][bucket]
        self._table = [[list(row) for row in self._prior] for _ in range(_DEPTHS)]

    @property
    def observations(self) -> float:
        """Return the number of proposals that it has learned from, without those that have faded."""
        return sum(tally.tried for row in self._pooled for tally in row)

    def start_from(self, prior: Prior) -> None:
        """Start from what was measured elsewhere, unless more than that was learned here already."""
        if self.observations > _PRIOR_WEIGHT * _RANKS * _BUCKETS:
            return
        trust = prior.observations / (prior.observations + _TRUST_POSITIONS)
        sibling = max(prior.sibling_acceptance, _MIN_SIBLING)
        self._prior = _prior(trust * _shift(prior.first_acceptance), 1.0 - trust * (1.0 - sibling))
        for row in range(_ROWS):
            for bucket in range(_BUCKETS):
                self._update(row, bucket)

    def probability(self, rank: int, margin: float, depth: int, agreement: Agreement = Agreement.UNKNOWN) -> float:
        """Return the probability that a proposal is accepted if its parent is.

        rank: 0 for the best sibling. margin: nats, without its sign. depth: 1 after the last committed token.
        """
        return self._table[_depth_class(depth)][_row(rank, agreement)][_bucket(margin)]

    def observe(
        self, rank: int, margin: float, depth: int, accepted: bool, agreement: Agreement = Agreement.UNKNOWN
    ) -> None:
        """Learn from a proposal whose parent was committed: was it the target's token? depth: when it was made."""
        row, bucket = _row(rank, agreement), _bucket(margin)
        self._pooled[row][bucket].add(accepted)
        self._by_depth[_depth_class(depth)][row][bucket].add(accepted)
        self._update(row, bucket)

    def _update(self, row: int, bucket: int) -> None:
        """Compute the probabilities of a row's margin bucket at every depth again."""
        pooled = self._pooled[row][bucket].share(self._prior[row][bucket], _PRIOR_WEIGHT)
        for table, tallies in zip(self._table, self._by_depth, strict=True):
            table[row][bucket] = tallies[row][bucket].share(pooled, _POOL_WEIGHT)


_ROWS = len(Agreement) * _RANKS
_BUCKETS = len(MARGIN_EDGES) + 1
_DEPTHS = len(DEPTH_EDGES) + 1


def _bucket(margin: float) -> int:
    return bisect.bisect_left(MARGIN_EDGES, abs(margin))


def _depth_class(depth: int) -> int:
    return bisect.bisect_left(DEPTH_EDGES, depth)


def _row(rank: int, agreement: Agreement) -> int:
    return agreement * _RANKS + min(rank, _RANKS - 1)


def _prior(shift: float, sibling: float) -> list[list[float]]:
    """Return `[row][bucket]`: a logistic curve for the best proposal, and shares of what it misses for the others.

    shift: added to the log odds of the best. sibling: share of its misses at which some sibling is accepted.
    """
    first = [_first(bucket, shift) for bucket in range(_BUCKETS)]
    ranks = [first] + [[(1.0 - p) * sibling * _SIBLING_SHARE[rank] for p in first] for rank in range(1, _RANKS)]
    return [[share * p for p in row] for share in _AGREEMENT_SHARE for row in ranks]


def _first(bucket: int, shift: float) -> float:
    edges = (0.0, *MARGIN_EDGES, 1.5 * MARGIN_EDGES[-1])
    middle = (edges[bucket] + edges[bucket + 1]) / 2
    return min(_MAX_PRIOR, 1.0 / (1.0 + math.exp(-shift - _STEEPNESS * middle)))


def _shift(first: float) -> float:
    """Return the shift at which this share of best proposals is accepted, with margins as they usually are."""
    low, high = -8.0, 8.0
    for _ in range(30):
        middle = (low + high) / 2
        right = sum(share * _first(bucket, middle) for bucket, share in enumerate(_USUAL_MARGINS))
        low, high = (middle, high) if right < first else (low, middle)
    return (low + high) / 2
