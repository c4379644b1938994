"""How often each token occurred: what the penalties count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class TokenCounts:
    """Occurrences in a session's prompt and output, as arrays, so that a row's penalties cost no walk over them all."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._places: dict[int, int] = {}
        """token -> where it stands in the arrays"""
        self._ids = np.zeros(64, dtype=np.int64)
        self._times = np.zeros(64, dtype=np.float64)
        self.add(tokens)

    @property
    def ids(self) -> NDArray[np.int64]:
        """`[n]`: the distinct tokens, in order of their first occurrence; a view."""
        return self._ids[: len(self._places)]

    @property
    def times(self) -> NDArray[np.float64]:
        """`[n]`: how often each of `ids` occurred; a view."""
        return self._times[: len(self._places)]

    def of(self, token: int) -> int:
        """How often one token occurred."""
        place = self._places.get(token)
        return 0 if place is None else int(self._times[place])

    def add(self, tokens: Iterable[int]) -> None:
        """These occurred too."""
        for token, times in Counter(tokens).items():
            place = self._places.get(token)
            if place is None:
                place = self._new_place(token)
            self._times[place] += times

    def _new_place(self, token: int) -> int:
        place = self._places[token] = len(self._places)
        if place == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._times = np.concatenate((self._times, np.zeros_like(self._times)))
        self._ids[place] = token
        return place
