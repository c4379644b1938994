"""How likely a guess is to be the target's token, learned online from commits.

A draft proposes siblings in the order of their scores (log q + g, or log q where the target is greedy). A guess is
known by its rank among them and its margin: for the first, how far it is ahead of the second; for the others, how far
they are behind the first. Acceptance is counted by (rank, margin), starting from a prior that is worth a few
observations, so that an unknown draft is trusted as far as drafts usually can be, and no further for long.
"""

from __future__ import annotations

import bisect
import math

import numpy as np
from numpy.typing import NDArray

MARGIN_EDGES = (0.05, 0.15, 0.3, 0.5, 0.75, 1.0, 1.4, 1.9, 2.5, 3.3, 4.5, 6.0, 8.0, 11.0)
"""Upper edges of the margin buckets, in nats; the last bucket is open."""

_RANKS = 4
"""Ranks that are told apart; greater ones share the last row."""
_PRIOR_WORTH = 6.0
"""Observations that the prior counts for."""
_MEMORY = 400.0
"""Observations of one bucket after which old ones fade: a draft's luck changes with the text."""
_SHARE = (0.0, 0.5, 0.3, 0.2)
"""Prior: what part of the first guess's misses the guess of each rank catches."""


class Calibrator:
    """Accept probabilities by (rank, margin). One per draft and temperature class, shared by its sessions.

    Not locked: an observation that two threads make at once may be lost, and nothing else.
    """

    def __init__(self) -> None:
        prior = [[_prior(rank, bucket) for bucket in range(_buckets())] for rank in range(_RANKS)]
        self._prior: NDArray[np.float64] = np.array(prior)
        self._tried: NDArray[np.float64] = np.zeros_like(self._prior)
        self._accepted: NDArray[np.float64] = np.zeros_like(self._prior)
        # Read far more often than it is learned: a plain list of lists is ten times as fast to index as an array.
        self._table: list[list[float]] = self._prior.tolist()

    @property
    def observations(self) -> float:
        """How many guesses it has learned from, faded ones left out."""
        return float(self._tried.sum())

    def probability(self, rank: int, margin: float) -> float:
        """That a guess of this rank (0 is the best sibling) and margin (nats, its sign is ignored) is accepted."""
        return self._table[min(rank, _RANKS - 1)][bisect.bisect_left(MARGIN_EDGES, abs(margin))]

    def observe(self, rank: int, margin: float, accepted: bool) -> None:
        """One guess whose parent was committed: whether the target's next token was this one."""
        row, column = min(rank, _RANKS - 1), bisect.bisect_left(MARGIN_EDGES, abs(margin))
        if self._tried[row, column] >= _MEMORY:
            self._tried[row, column] *= 0.5
            self._accepted[row, column] *= 0.5
        self._tried[row, column] += 1.0
        self._accepted[row, column] += accepted
        self._table[row][column] = float(
            (self._accepted[row, column] + _PRIOR_WORTH * self._prior[row, column])
            / (self._tried[row, column] + _PRIOR_WORTH)
        )


def _buckets() -> int:
    return len(MARGIN_EDGES) + 1


def _prior(rank: int, bucket: int) -> float:
    """A logistic curve for the first guess, and a share of what it misses for the others."""
    edges = (0.0, *MARGIN_EDGES, 1.5 * MARGIN_EDGES[-1])
    middle = (edges[bucket] + edges[bucket + 1]) / 2
    first = min(0.97, 1.0 / (1.0 + math.exp(-0.8 * middle)))
    return first if rank == 0 else (1.0 - first) * _SHARE[rank]
