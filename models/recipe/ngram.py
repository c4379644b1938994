"""A 5-gram model with modified Kneser-Ney smoothing: what a trained target has to beat.

Chen and Goodman, "An Empirical Study of Smoothing Techniques for Language Modeling" (1998), interpolated.
An n-gram is one integer, 13 bits per token with the last token lowest; five tokens would need 65 bits, so
the fifth order is keyed by the index of its 4-gram context instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from models.recipe.settings import VOCAB_SIZE

ORDER = 5
_BITS = 13
_MASK = VOCAB_SIZE - 1
Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Level:
    """The counts of one order: n-grams in ascending order of key, and their contexts likewise."""

    grams: Ints
    counts: Ints
    contexts: Ints
    totals: Floats
    kept_back: Floats
    """Share of each context's mass that the discounts hand to the next lower order."""
    discounts: Floats

    def mix(self, keys: Ints, lower: Floats) -> Floats:
        """Return P(last token | context) for each key, given the next lower order's probabilities."""
        place, known = _find(self.contexts, keys >> _BITS)
        gram, seen = _find(self.grams, keys)
        counts = np.where(seen, self.counts[gram], 0)
        own = (counts - self.discounts[np.minimum(counts, 3)]) / self.totals[place]
        mixed: Floats = np.where(known, own + self.kept_back[place] * lower, lower)
        return mixed


class KneserNey:
    """Trained once on a stream of tokens."""

    def __init__(self, stream: NDArray[np.integer[Any]]) -> None:
        tokens = stream.astype(np.int64)
        keys = {order: _keys(tokens, order) for order in range(1, ORDER)}
        self._fours = np.unique(keys[ORDER - 1])
        keys[ORDER] = self._fifth(tokens)
        self._levels: dict[int, Level] = {}
        starts = np.arange(len(keys[ORDER]))
        for order in range(ORDER, 0, -1):
            # The highest order counts occurrences, the others in how many ways they are continued to the left:
            # ``starts`` holds one place for each different (n+1)-gram, moved on to the n-gram that ends it.
            grams, first, counts = np.unique(keys[order][starts], return_index=True, return_counts=True)
            self._levels[order] = _level(grams, counts)
            starts = starts[first] + 1

    def log_probs(self, document: NDArray[np.integer[Any]]) -> Floats:
        """Return the natural log-probability of every token but the first."""
        tokens = document.astype(np.int64)
        probs = np.full(len(tokens), 1 / VOCAB_SIZE)
        for order in range(1, ORDER):
            probs[order - 1 :] = self._levels[order].mix(_keys(tokens, order), probs[order - 1 :])
        fifth = self._fifth(tokens)
        mixed = self._levels[ORDER].mix(fifth, probs[ORDER - 1 :])
        probs[ORDER - 1 :] = np.where(fifth >= 0, mixed, probs[ORDER - 1 :])
        logs: Floats = np.log(probs[1:])
        return logs

    def _fifth(self, tokens: Ints) -> Ints:
        """Keys of the highest order; -1 where the 4-gram context was never seen."""
        contexts = _keys(tokens, ORDER - 1)[:-1]
        place, known = _find(self._fours, contexts)
        return np.where(known, (place << _BITS) | tokens[ORDER - 1 :], -1)


def _keys(tokens: Ints, order: int) -> Ints:
    """Key i is the n-gram that begins at token i."""
    count = len(tokens) - order + 1
    keys = np.zeros(max(count, 0), np.int64)
    for shift in range(order):
        keys = (keys << _BITS) | tokens[shift : shift + count]
    return keys


def _level(grams: Ints, counts: Ints) -> Level:
    seen = [int((counts == number).sum()) for number in (1, 2, 3, 4)]
    base = seen[0] / (seen[0] + 2 * seen[1])
    # D(c) = c - (c + 1) * base * n(c + 1) / n(c), for c = 1, 2 and "3 or more"
    steps = [number - (number + 1) * base * seen[number] / seen[number - 1] for number in (1, 2, 3)]
    discounts = np.array([0.0, *steps])
    contexts, inverse = np.unique(grams >> _BITS, return_inverse=True)
    totals = np.bincount(inverse, weights=counts).astype(np.float64)
    kept_back = np.bincount(inverse, weights=discounts[np.minimum(counts, 3)]) / totals
    return Level(grams, counts, contexts, totals, kept_back, discounts)


def _find(sorted_keys: Ints, wanted: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    place = np.minimum(np.searchsorted(sorted_keys, wanted), len(sorted_keys) - 1)
    return place, sorted_keys[place] == wanted
