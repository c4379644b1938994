"""The best tokens of a row of logits without sorting the vocabulary.

The row is cut into blocks. If every block's greatest logit is known, only the k blocks with the greatest ones can hold
the best k: any token of another block has k block maxima before it. argpartition of the whole row costs 4x as much.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Logits = NDArray[np.float32]

_BLOCK = 128


def top_candidates(logits: Logits, k: int) -> tuple[Ids, Logits]:
    """The k greatest logits of each row, greatest first, equal ones by lower id.

    logits `[V]` or `[n, V]`; returns ids and logits, `[k]` or `[n, k]`, with k at most V. NaN is not expected.
    """
    rows = np.atleast_2d(logits)
    ids, values, _ = _top(rows, k)
    return (ids, values) if logits.ndim == 2 else (ids[0], values[0])


def top_log_probs(logits: Logits, k: int) -> tuple[Ids, Logits]:
    """As `top_candidates`, but log-probabilities (natural, over the whole row) in the place of logits."""
    rows = np.atleast_2d(logits)
    ids, values, greatest = _top(rows, k)
    log_sum_exp = greatest + np.log(np.exp(rows - greatest).sum(axis=1, keepdims=True))
    log_probs = values - log_sum_exp
    return (ids, log_probs) if logits.ndim == 2 else (ids[0], log_probs[0])


def _top(rows: Logits, k: int) -> tuple[Ids, Logits, Logits]:
    """ids `[n, k]`, values `[n, k]` and each row's maximum `[n, 1]`."""
    n, vocab = rows.shape
    k = min(k, vocab)
    whole = vocab // _BLOCK
    blocks = rows[:, : whole * _BLOCK].reshape(n, whole, _BLOCK).max(axis=2)
    if whole * _BLOCK < vocab:
        blocks = np.concatenate([blocks, rows[:, whole * _BLOCK :].max(axis=1, keepdims=True)], axis=1)
    ids = np.empty((n, k), dtype=np.int64)
    for i in range(n):
        ids[i] = _top_of_row(rows[i], blocks[i], k)
    return ids, np.take_along_axis(rows, ids, axis=1), blocks.max(axis=1, keepdims=True)


def _top_of_row(row: Logits, block_max: Logits, k: int) -> Ids:
    """ids `[k]` of one row `[V]`."""
    best = np.argsort(-block_max, kind="stable")[:k]  # equal maxima: the lower block holds the lower ids
    near = (np.sort(best)[:, None] * _BLOCK + np.arange(_BLOCK)).ravel()
    near = near[: np.searchsorted(near, row.shape[0])]  # the last block may be short
    values = row[near]
    if best.shape[0] == k:  # k block maxima are at least this great, so no smaller value is among the best
        keep = values >= block_max[best[-1]]
        near, values = near[keep], values[keep]
    result: Ids = near[np.argsort(-values, kind="stable")[:k]]
    return result
