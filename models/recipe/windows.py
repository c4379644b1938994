"""Training windows as a pure function of seed and number: nothing about the data needs to be checkpointed."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.uint16]


class Mixture:
    """Windows of several token streams in fixed proportion, each stream without replacement per epoch."""

    def __init__(self, folder: Path, shares: dict[str, int], seed: int) -> None:
        self._streams = {kind: load_tokens(folder, kind, "train") for kind in shares}
        self._seed = seed
        self._cycle = _interleave(shares)
        self._epoch_windows = lru_cache(maxsize=32)(self._shuffle)

    def batch(self, first: int, count: int, length: int) -> NDArray[np.int64]:
        """Return windows ``first`` and following, ``[count, length + 1]``: inputs and, shifted by one, what follows."""
        return np.stack([self._window(first + row, length + 1) for row in range(count)]).astype(np.int64)

    def _window(self, number: int, length: int) -> Tokens:
        kind = self._cycle[number % len(self._cycle)]
        turns = self._cycle.count(kind)
        rank = number // len(self._cycle) * turns + self._cycle[: number % len(self._cycle)].count(kind)
        stream = self._streams[kind]
        per_epoch = (len(stream) - length) // length
        epoch, place = divmod(rank, per_epoch)
        start = int(self._epoch_windows(kind, length, epoch)[place])
        return stream[start : start + length]

    def _shuffle(self, kind: str, length: int, epoch: int) -> NDArray[np.int64]:
        stream = self._streams[kind]
        rng = np.random.default_rng([self._seed, epoch, length, sorted(self._streams).index(kind)])
        # Another phase each epoch, so that the cuts between windows fall elsewhere.
        phase = int(rng.integers(0, length))
        starts = phase + length * np.arange((len(stream) - length) // length)
        return rng.permutation(starts)


def load_tokens(folder: Path, kind: str, split: str) -> Tokens:
    """Map the token stream of one kind and split, all documents end to end."""
    stream: Tokens = np.load(folder / f"{kind}-{split}.npy", mmap_mode="r", allow_pickle=False)
    return stream


def load_documents(folder: Path, kind: str, split: str) -> list[Tokens]:
    """Return the token ids of every document of one kind and split."""
    ends = np.load(folder / f"{kind}-{split}-ends.npy", allow_pickle=False)
    return np.split(np.asarray(load_tokens(folder, kind, split)), ends[:-1])


def _interleave(shares: dict[str, int]) -> list[str]:
    """Spread the kinds evenly over one cycle, so that every batch has nearly the same mixture."""
    slots = [((turn + 0.5) / count, kind) for kind, count in shares.items() for turn in range(count)]
    return [kind for _, kind in sorted(slots)]
