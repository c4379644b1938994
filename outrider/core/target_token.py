"""Choose the target's token by its logits and the noise: argmax(log p + g), p after temperature and filters.

`reference_token` is the definition: probability and noise of every token that is left. `sampled_token` returns the same
token at a tenth of the cost in a large vocabulary: it looks only at tokens that can win, and where rounding could make
a difference it asks the reference.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.coupling import gumbel, ids_above
from outrider.core.errors import InternalError
from outrider.core.processors import greatest, mass_before, surviving_log_probs
from outrider.core.sampling import SamplingParams
from outrider.core.scratch import reaching, scratch

Row = NDArray[np.floating[Any]]
Ids = NDArray[np.int64]

LARGE = 1 << 14
"""Tokens of the smallest vocabulary in which it pays to look for those that can win."""
_HEAD = 512
"""Most likely tokens that are looked at one by one. The noise of all others need only be compared with a bound, which
about V / _HEAD of them exceed."""
_SLACK = 1e-9
"""Nats; more than the errors of float64 amount to, if logits are not beyond FAR."""
FAR = 1e5
"""Nats from 0 up to which a token can be certain without the reference."""
_WEIGHT_SLACK = 1e-4
"""Relative; more than the errors of float32 amount to in a weight that counts, or in a sum of V of them."""


def argmax(scores: Row) -> int:
    """Return the first index of the greatest score, which NaN is. Raises InternalError if that is not finite."""
    best = int(scores.argmax()) if len(scores) else -1
    if best < 0 or not np.isfinite(scores[best]):
        raise InternalError("the target's logits are not finite")
    return best


def reference_token(logits: Row, params: SamplingParams, at: int) -> int:
    """Return the sampled token. logits: `[V]`, after penalties. at: the position's key. Of equal ones the first wins.

    Raises InternalError if the logits are not finite.
    """
    # Noise is added only to what the filters left. NaN is not filtered, so that it is found.
    ids, log_p = surviving_log_probs(logits.astype(np.float64, copy=False), params)
    return int(ids[argmax(log_p + gumbel(at, ids))])


def token_of(ids: Ids, logits: Row, params: SamplingParams, at: int) -> int:
    """Return the token that is chosen where only `ids` `[n]`, ascending, are allowed, which have these logits `[n]`.

    Raises InternalError if the logits are not finite.
    """
    if params.greedy:
        return int(ids[argmax(logits)])
    left, log_p = surviving_log_probs(logits.astype(np.float64, copy=False), params)
    return int(ids[left][argmax(log_p + gumbel(at, ids[left]))])


def sampled_token(logits: Row, params: SamplingParams, at: int) -> int:
    """Return what `reference_token` returns, and raise what it raises."""
    token = quick_token(logits, params, at) if len(logits) >= LARGE else None
    return reference_token(logits, params, at) if token is None else token


def token_among(ids: Ids, logits: Row, params: SamplingParams, at: int) -> int | None:
    """Return the sampled token if top-k leaves none but some of `ids` `[n]`, ascending, with these logits `[n]`.

    None if that is not certain without the reference.
    """
    if not abs(float(logits.max())) <= FAR * params.temperature:
        return None  # also NaN
    found = _by_likelihood(ids, logits, params.temperature)
    if found is None:
        return None
    head = _filtered(found[0][: params.top_k], found[1][: params.top_k], params, None)
    return _winner(head, head.scaled + gumbel(at, head.ids))


def _winner(head: _Head, noisy: NDArray[np.float64]) -> int | None:
    """Return the token of the greatest score among the head's, None if that is not certain."""
    best = int(noisy.argmax())
    certain = best < head.certain and np.count_nonzero(noisy >= noisy[best] - _SLACK) == 1
    return int(head.ids[best]) if certain else None


def quick_token(logits: Row, params: SamplingParams, at: int) -> int | None:
    """Return the sampled token, or None if that is not certain without the reference; arguments are the reference's."""
    head = _head_of(logits, params)
    if head is None:
        return None
    noisy = head.scaled + gumbel(at, head.ids)
    best = int(noisy.argmax())
    if best >= head.certain:
        return None
    if head.closed:
        return _winner(head, noisy)
    ids, scaled, scores = _rivals(logits, head, params, at, float(noisy[best]) - _SLACK)
    rank = _first_allowed(head, ids, scaled, params)
    if rank is None or rank == len(ids):
        return None if rank is None else _winner(head, noisy)
    second = max([float(noisy[best]), *scores[rank + 1 : rank + 2].tolist()])
    return int(ids[rank]) if scores[rank] > second + _SLACK else None


@dataclass(frozen=True)
class _Weights:
    """Holds the probability of every token relative to the most likely one's, in float32, until the thread's next."""

    each: NDArray[np.float32]
    """`[V]`"""
    total: float

    @classmethod
    def of(cls, logits: Row, top: float, temperature: float) -> _Weights:
        """Compute them. logits: `[V]`, the greatest of which is `top`."""
        each = scratch("weights", len(logits), np.float32)
        with np.errstate(over="ignore", under="ignore"):  # of tokens beyond any reach
            np.subtract(logits, top, out=each, casting="same_kind")
            np.multiply(each, np.float32(math.log2(math.e) / temperature), out=each)
            np.exp2(each, out=each)  # two thirds of the time of exp
        return cls(each, _sum(each))

    def sum_from(self, least: float) -> float:
        """Return the sum of all weights of at least `least`."""
        bound = np.float32(least)
        # sum(min(w, bound)) has these as `bound`, and the others as they are.
        clipped = scratch("clipped", len(self.each), np.float32)
        others = _sum(np.clip(self.each, np.float32(0.0), bound, out=clipped))
        return self.total - others + float(bound) * int(np.count_nonzero(reaching(self.each, bound)))


def _sum(weights: NDArray[np.float32]) -> float:
    """Return the sum by interleaved columns, which is faster than by one, and as precise as _WEIGHT_SLACK wants it."""
    rows = len(weights) // 1024
    columns = weights[: rows * 1024].reshape(rows, 1024).sum(axis=0)
    return float(columns.sum(dtype=np.float64) + weights[rows * 1024 :].sum(dtype=np.float64))


@dataclass(frozen=True)
class _Head:
    """Holds the most likely tokens that the filters may leave, most likely first; of equal ones the first in front."""

    ids: Ids
    scaled: NDArray[np.float64]
    """Their logits over the temperature."""
    certain: int
    """Number of those in front that the filters leave for certain; at least 1."""
    closed: bool
    """Whether the filters leave no other token."""
    floor: float
    """All tokens that are not looked at have smaller logits."""
    weights: _Weights | None
    """Known if top-p may leave a token outside the head."""

    def allows(self, token: int, scaled: float, params: SamplingParams) -> bool | None:
        """Return whether the filters leave a token outside the head; None if it is not certain."""
        if params.min_p > 0.0:
            above = scaled - float(self.scaled[0]) - math.log(params.min_p)
            if abs(above) <= _SLACK:
                return None
            if above < 0.0:
                return False
        if self.weights is None:
            return True
        weight, total = float(self.weights.each[token]), self.weights.total
        if self.weights.sum_from(weight * (1.0 - _WEIGHT_SLACK)) <= (params.top_p - _WEIGHT_SLACK) * total:
            return True
        if self.weights.sum_from(weight * (1.0 + _WEIGHT_SLACK)) >= (params.top_p + _WEIGHT_SLACK) * total:
            return False
        return None


def _head_of(logits: Row, params: SamplingParams) -> _Head | None:
    """Return the head of a distribution; None if its filters' order of tokens is not certain."""
    top_k = params.top_k if params.top_k < len(logits) else 0
    top, floor = greatest(logits, max(_HEAD, top_k))
    if not abs(top) <= FAR * params.temperature:
        return None  # also NaN
    near = floor - 2.0 * _SLACK * params.temperature
    ids = np.flatnonzero(reaching(logits, max(near, float(np.finfo(logits.dtype).min))))
    found = _by_likelihood(ids, logits[ids], params.temperature)
    if found is None:
        return None
    ids, scaled = found
    if not (top_k > 0 or floor == -math.inf):
        inside = int(np.count_nonzero(scaled >= floor / params.temperature))
        return _filtered(ids[:inside], scaled[:inside], params, (logits, top, floor))
    return _filtered(ids[: top_k or None], scaled[: top_k or None], params, None)


def _by_likelihood(ids: Ids, values: Row, temperature: float) -> tuple[Ids, NDArray[np.float64]] | None:
    """Return ids and logits over the temperature, greatest first, of equal ones the lowest id; None if two are near."""
    scaled = values.astype(np.float64) / temperature
    order = np.argsort(-scaled, kind="stable")
    ids, scaled = ids[order], scaled[order]
    gaps = scaled[:-1] - scaled[1:]
    # Once normalised these may be equal, and then ordered by id.
    return None if ((gaps > 0.0) & (gaps <= _SLACK)).any() else (ids, scaled)


def _filtered(
    ids: Ids, scaled: NDArray[np.float64], params: SamplingParams, outside: tuple[Row, float, float] | None
) -> _Head:
    """Return those of the most likely tokens that top-p and min-p may leave.

    outside: None if the filters leave no other tokens; else all logits, the greatest of them, and the head's least one.
    """
    certain = possible = len(ids)
    weights = None
    if params.top_p < 1.0:
        own = np.exp(scaled - scaled[0])
        weights = None if outside is None else _Weights.of(outside[0], outside[1], params.temperature)
        total, slack = (weights.total, _WEIGHT_SLACK) if weights else (float(own.sum()), _SLACK)
        bounds = ((params.top_p - slack) * total, (params.top_p + slack) * total)
        certain, possible = np.searchsorted(mass_before(own), bounds).tolist()
    if params.min_p > 0.0:
        least = float(scaled[0]) + math.log(params.min_p)
        cuts = np.searchsorted(-scaled, (-least - _SLACK, -least + _SLACK), side="right").tolist()
        certain, possible = min(certain, cuts[0]), min(possible, cuts[1])
    closed = outside is None or possible < len(ids)
    floor = -math.inf if outside is None else outside[2]
    return _Head(ids[:possible], scaled[:possible], max(1, certain), closed, floor, weights)


def _first_allowed(head: _Head, ids: Ids, scaled: NDArray[np.float64], params: SamplingParams) -> int | None:
    """Return the index of the first rival that the filters leave, `n` if they leave none; None if it is not certain."""
    refused = -math.inf
    for rank, token in enumerate(ids.tolist()):
        if scaled[rank] <= refused:
            continue  # less likely than one that is out
        allowed = head.allows(token, float(scaled[rank]), params)
        if allowed is not False:
            return rank if allowed else None
        refused = max(refused, float(scaled[rank]))
    return len(ids)


def _rivals(
    logits: Row, head: _Head, params: SamplingParams, at: int, least: float
) -> tuple[Ids, NDArray[np.float64], NDArray[np.float64]]:
    """Return ids, scaled logits and scores `[n]` of the tokens outside the head that score `least`, the best first."""
    # They are less likely than any token of the head, and need so much more noise.
    ids = ids_above(at, len(logits), least - float(head.scaled[-1]) - _SLACK)
    values = logits[ids]
    outside = values < head.floor
    ids, scaled = ids[outside], values[outside].astype(np.float64) / params.temperature
    scores = scaled + gumbel(at, ids)
    order = np.flatnonzero(scores >= least)
    order = order[np.argsort(-scores[order])]
    return ids[order], scaled[order], scores[order]
