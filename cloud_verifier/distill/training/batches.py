"""Divide texts into the batches of optimizer steps, and batches into the tensors of forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from cloud_verifier.distill.texts import Text


@dataclass(frozen=True)
class TrainingBatch:
    """The rows that one forward pass reads, and the target's distributions at its n labelled positions."""

    ids: Tensor
    """`[rows, L]`: each row is a text without its last token, padded at its end, where causal attention never looks."""
    positions: Tensor
    """`[n]`: indices into the flattened `ids` of the tokens right before the labelled ones."""
    top_ids: Tensor
    """`[n, K]`"""
    top_log_probs: Tensor
    """`[n, K]`"""
    tail: Tensor
    """`[n]`"""

    @classmethod
    def of(cls, texts: Sequence[Text], device: torch.device) -> TrainingBatch:
        """Build the batch of some texts, of which there must be at least one."""
        width = max(len(text.tokens) for text in texts) - 1
        ids = np.zeros((len(texts), width), np.int64)
        for row, text in zip(ids, texts, strict=True):
            row[: len(text.tokens) - 1] = text.tokens[:-1]
        positions = [row * width + np.arange(text.first - 1, len(text.tokens) - 1) for row, text in enumerate(texts)]
        return cls(
            torch.from_numpy(ids).to(device),
            torch.from_numpy(np.concatenate(positions)).to(device),
            torch.from_numpy(np.concatenate([text.top_ids[text.first :] for text in texts])).long().to(device),
            torch.from_numpy(np.concatenate([text.top_log_probs[text.first :] for text in texts])).to(device),
            torch.from_numpy(np.concatenate([text.tail[text.first :] for text in texts])).to(device),
        )


class BatchSampler:
    """Chooses each step's texts: every text once an epoch, in an order given by seed and epoch alone."""

    def __init__(self, texts: Sequence[Text], batch_tokens: int, seed: int) -> None:
        self._labels = np.array([text.label_count for text in texts], np.int64)
        self._seed = seed
        self.batches = max(1, min(len(texts), round(int(self._labels.sum()) / batch_tokens)))
        """Steps in an epoch."""

    def batch(self, step: int) -> list[int]:
        """Return the indices of a step's texts, at least one."""
        epoch, number = divmod(step, self.batches)
        shuffled = np.random.default_rng([self._seed, epoch]).permutation(len(self._labels))
        before = np.cumsum(self._labels[shuffled]) - self._labels[shuffled]
        # Batches are cut where they have about the same number of labels, with at least one text in each.
        numbers = np.arange(self.batches)
        bounds = np.searchsorted(before, numbers * (self._labels.sum() / self.batches))
        bounds = np.maximum.accumulate(bounds - numbers) + numbers
        bounds = np.minimum(bounds, len(shuffled) - self.batches + numbers)
        end = bounds[number + 1] if number + 1 < self.batches else len(shuffled)
        return [int(index) for index in shuffled[bounds[number] : end]]


def micro_batches(texts: Sequence[Text], indices: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Split a batch into forward passes of at most `max_tokens`, padding included; a longer text gets its own."""
    by_length = sorted(indices, key=lambda index: (len(texts[index].tokens), index))
    groups: list[list[int]] = []
    for index in by_length:
        if groups and (len(groups[-1]) + 1) * (len(texts[index].tokens) - 1) <= max_tokens:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups
