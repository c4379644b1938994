"""Count how often each token occurred, for penalties."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """Occurrences in a session's prompt and output, as arrays, so that penalties need no loop over all tokens."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._index: dict[int, int] = {}
        """token -> its index in the arrays"""
        self._ids = np.zeros(64, dtype=np.int64)
        self._times = np.zeros(64, dtype=np.float64)
        self.add(tokens)

    @property
    def ids(self) -> NDArray[np.int64]:
        """`[n]`: the distinct tokens, in order of their first occurrence; a view."""
        return self._ids[: len(self._index)]

    @property
    def times(self) -> NDArray[np.float64]:
        """`[n]`: how often each of `ids` occurred; a view."""
        return self._times[: len(self._index)]

    def of(self, token: int) -> int:
        """Return how often one token occurred."""
        index = self._index.get(token)
        return 0 if index is None else int(self._times[index])

    def add(self, tokens: Iterable[int]) -> None:
        """Count further tokens."""
        for token, times in Counter(tokens).items():
            index = self._index.get(token)
            if index is None:
                index = self._new_index(token)
            self._times[index] += times

    def _new_index(self, token: int) -> int:
        index = self._index[token] = len(self._index)
        if index == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._times = np.concatenate((self._times, np.zeros_like(self._times)))
        self._ids[index] = token
        return index
