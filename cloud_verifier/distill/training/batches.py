"""Batches of texts: which texts a step takes, and their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cloud_verifier.distill.data.texts import Text


@dataclass(frozen=True)
class Batch:
    """Rows for one forward pass, and what the target says at the n positions that are learnt from."""

    ids: Tensor
    """`[rows, L]`, each row a text without its last token, padded at its end: causal attention never sees padding."""
    places: Tensor
    """`[n]`: indices into the flattened `ids`, of the tokens before those that are learnt."""
    top_ids: Tensor
    """`[n, K]`"""
    top_log_probs: Tensor
    """`[n, K]`"""
    tail: Tensor
    """`[n]`"""

    @classmethod
    def of(cls, texts: Sequence[Text], device: torch.device) -> Batch:
        width = max(len(text.tokens) for text in texts) - 1
        ids = np.zeros((len(texts), width), np.int64)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text.tokens) - 1] = text.tokens[:-1]
        places = [row * width + np.arange(text.first - 1, len(text.tokens) - 1) for row, text in enumerate(texts)]
        return cls(
            torch.from_numpy(ids).to(device),
            torch.from_numpy(np.concatenate(places)).to(device),
            torch.from_numpy(np.concatenate([text.top_ids[text.first :] for text in texts])).long().to(device),
            torch.from_numpy(np.concatenate([text.top_log_probs[text.first :] for text in texts])).to(device),
            torch.from_numpy(np.concatenate([text.tail[text.first :] for text in texts])).to(device),
        )


class Order:
    """Which texts each step takes: every text once an epoch, in an order that follows from seed and epoch alone."""

    def __init__(self, texts: Sequence[Text], batch_tokens: int, seed: int) -> None:
        self._learnt = np.array([text.learnt for text in texts], np.int64)
        self._seed = seed
        self.batches = max(1, min(len(texts), round(int(self._learnt.sum()) / batch_tokens)))
        """Steps in an epoch."""

    def of_step(self, step: int) -> list[int]:
        """The texts' indices; never empty."""
        epoch, place = divmod(step, self.batches)
        shuffled = np.random.default_rng([self._seed, epoch]).permutation(len(self._learnt))
        before = np.cumsum(self._learnt[shuffled]) - self._learnt[shuffled]
        # By tokens, so that batches weigh about the same, and at least one text each.
        number = np.arange(self.batches)
        bounds = np.searchsorted(before, number * (self._learnt.sum() / self.batches))
        bounds = np.maximum.accumulate(bounds - number) + number
        bounds = np.minimum(bounds, len(shuffled) - self.batches + number)
        end = bounds[place + 1] if place + 1 < self.batches else len(shuffled)
        return [int(index) for index in shuffled[bounds[place] : end]]


def pieces(texts: Sequence[Text], indices: Sequence[int], width: int) -> list[list[int]]:
    """Split a batch into forward passes of at most `width` tokens, padding included; a longer text stands alone."""
    by_length = sorted(indices, key=lambda index: (len(texts[index].tokens), index))
    groups: list[list[int]] = []
    for index in by_length:
        if groups and (len(groups[-1]) + 1) * (len(texts[index].tokens) - 1) <= width:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups
