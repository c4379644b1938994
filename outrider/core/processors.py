"""Apply sampling parameters to logits in one order: penalties, bias, temperature, top-k, top-p, min-p.

Both sides use it: on the target's logits it decides the output, on the draft's only the proposals.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.sampling import SamplingParams

Logits = NDArray[np.float64]

_REACHES = (4.0, 10.0, math.inf)
"""Nats below the most likely token within which the nucleus is searched, the narrowest first."""


class TokenCounts:
    """Arrays that count a session's tokens, so that penalties need no loop over all of them: each token of prompt and
    output is known, and only its occurrences in the output count."""

    def __init__(self, prompt: Iterable[int] = (), output: Iterable[int] = ()) -> None:
        self._index: dict[int, int] = {}
        """token -> its index in the arrays"""
        self._ids = np.zeros(64, dtype=np.int64)
        self._times = np.zeros(64, dtype=np.float64)
        self._add(dict.fromkeys(prompt, 0))
        self.add(output)

    @property
    def ids(self) -> NDArray[np.int64]:
        """Return the distinct tokens `[n]`, in order of their first occurrence; a view."""
        return self._ids[: len(self._index)]

    @property
    def times(self) -> NDArray[np.float64]:
        """Return how often each of `ids` occurred in the output, `[n]`; a view."""
        return self._times[: len(self._index)]

    def of(self, token: int) -> int:
        """Return how often one token occurred in the output."""
        index = self._index.get(token)
        return 0 if index is None else int(self._times[index])

    def add(self, tokens: Iterable[int]) -> None:
        """Count further tokens of the output."""
        self._add(Counter(tokens))

    def _add(self, counts: Mapping[int, int]) -> None:
        for token, times in counts.items():
            index = self._index.get(token)
            if index is None:
                index = self._index[token] = len(self._index)
                if index == len(self._ids):
                    self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                    self._times = np.concatenate((self._times, np.zeros_like(self._times)))
                self._ids[index] = token
            self._times[index] += times


def penalise(logits: Logits, params: SamplingParams, counts: TokenCounts, path: Iterable[int] = ()) -> Logits:
    """Apply penalties and bias to logits `[V]`; returns a new array, or `logits` itself if none is on.

    The repetition penalty is for tokens of prompt and output, the others are for those of the output alone, as in vLLM.
    counts: of both. path: the node's own ancestors, which count as output.
    """
    if not params.penalised:
        return logits
    out = logits.copy()
    _penalise_ids(out, logits, params, counts.ids, counts.times)
    on_path = {token: counts.of(token) + times for token, times in Counter(path).items()}
    if on_path:  # their logits once more, with the greater counts
        ids = np.fromiter(on_path.keys(), dtype=np.int64, count=len(on_path))
        times = np.fromiter(on_path.values(), dtype=np.float64, count=len(on_path))
        _penalise_ids(out, logits, params, ids, times)
    for token, value in params.logit_bias:
        if token < out.shape[0]:
            out[token] += value
    return out


def _penalise_ids(
    out: Logits, logits: Logits, params: SamplingParams, ids: NDArray[np.int64], times: NDArray[np.float64]
) -> None:
    """Write `logits[ids]` less the penalties for so many occurrences to `out[ids]`; ids outside `[V]` are skipped."""
    known = ids < logits.shape[0]
    if not known.all():
        ids, times = ids[known], times[known]
    values = logits[ids]
    values = np.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    out[ids] = values - params.presence_penalty * (times > 0) - params.frequency_penalty * times


def log_softmax(logits: Logits) -> Logits:
    shifted: Logits = logits - logits.max()
    shifted -= np.log(np.exp(shifted).sum())
    return shifted


def surviving_log_probs(logits: Logits, params: SamplingParams) -> tuple[NDArray[np.int64], Logits]:
    """Return the ids `[n]` that temperature, top-k, top-p and min-p leave, ascending, and their log p `[n]`.

    Each filter sees the distribution that the one before it left, renormalised. A constant offset changes no argmax,
    so the result itself is not renormalised. Equal probabilities are ordered by token id. Only for `temperature > 0`.
    """
    log_p = log_softmax(logits / params.temperature)
    vocab = log_p.shape[0]
    if params.top_k and params.top_k < vocab:
        least = np.partition(log_p, vocab - params.top_k)[vocab - params.top_k]
        keep = _down_to(least, log_p, params.top_k)
        kept = np.full_like(log_p, -np.inf)
        kept[keep] = log_p[keep]
        log_p = log_softmax(kept)
    least = log_p.max() + math.log(params.min_p) if params.min_p > 0.0 else -np.inf
    # NaN is kept, so that the caller notices it.
    ids = _nucleus(log_p, params.top_p) if params.top_p < 1.0 else np.flatnonzero(log_p != -np.inf)
    log_p = log_p[ids]
    if params.min_p > 0.0:
        enough = ~(log_p < least)
        ids, log_p = ids[enough], log_p[enough]
    return ids, log_p


def _nucleus(log_p: Logits, top_p: float) -> NDArray[np.int64]:
    """Return the ids, ascending, of the most likely tokens down to a probability of `top_p` in all.

    Sorting a whole vocabulary is most of the cost of sampling, so only tokens near the most likely one are sorted, more
    of them where their probability falls short. Sums run in the same order either way: the bits are the same.
    """
    top = log_p.max()
    if np.isnan(top):
        return np.arange(log_p.shape[0])  # everything is NaN then, and is kept
    for reach in _REACHES:
        ids = np.flatnonzero(log_p >= top - reach)
        head = log_p[ids]
        if reach == math.inf or np.exp(head).sum() >= top_p + 1e-9:
            break
    falling = -np.sort(-head)
    count = int(np.searchsorted(mass_before(np.exp(falling)), top_p))
    kept: NDArray[np.int64] = ids[_down_to(falling[count - 1], head, count)]
    return kept


def _down_to(least: np.float64, log_p: Logits, count: int) -> NDArray[np.int64]:
    """Return the indices of the `count` most likely, ascending; of those with log p `least` the first ones are in."""
    among = log_p > least
    equals = np.flatnonzero(log_p == least)
    among[equals[: count - int(np.count_nonzero(among))]] = True
    return np.flatnonzero(among)


def mass_before(p: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return `[n]`: for each element the sum of all before it, exactly 0 for the first, and never falling."""
    before = np.empty_like(p)
    before[:1] = 0.0
    np.cumsum(p[:-1], out=before[1:])
    return before


def greatest(row: NDArray[np.floating[Any]], count: int) -> tuple[float, float]:
    """Return the maximum of `row` `[V]`, and a value that at least `count` elements reach, close to the count-th.

    With NaN in the row the maximum is NaN. Of a long row it is the count-th of the maxima of interleaved columns, which
    needs one pass and no partition of V elements.
    """
    columns = max(1024, 2 * count)
    rows = len(row) // columns
    if rows < 4:
        count = min(count, len(row))
        return float(row.max()), float(np.partition(row, -count)[-count])
    maxima = row[: rows * columns].reshape(rows, columns).max(axis=0)
    rest = row[rows * columns :]
    np.maximum(maxima[: len(rest)], rest, out=maxima[: len(rest)])
    return float(maxima.max()), float(np.partition(maxima, -count)[-count])
