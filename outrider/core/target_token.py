"""Choose the target's token by its logits and the noise: argmax(log p + g), p after temperature and filters.

`reference_token` is the definition: probability and noise of every token that is left. `certain_tokens` returns the
same tokens of many rows at a tenth of the cost in a large vocabulary: it looks only at tokens that can win, of all rows
together, and leaves out a row where rounding could make a difference.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.coupling import gumbel, ids_above
from outrider.core.errors import InternalError
from outrider.core.processors import greatest, surviving_log_probs
from outrider.core.sampling import SamplingParams
from outrider.core.scratch import reaching, scratch

Row = NDArray[np.floating[Any]]
Ids = NDArray[np.int64]

SLACK = 1e-9
"""Nats, or a share of a probability; more than the errors of float64 amount to, if logits are not beyond FAR."""
FAR = 1e5
"""Nats from 0 up to which a token can be certain without the reference."""
_WEIGHT_SLACK = 1e-4
"""Relative; more than the errors of float32 amount to in a sum of V weights."""
_COLD = 0.5
"""Below this temperature many weights would underflow, each of which takes up to a hundred times as long."""
_REACHES = (8.0, 9.5, 11.0, 14.0, 20.0)
"""Nats below the likeliest token within which the tokens that top-p leaves are looked for, the narrowest first."""
_OPEN_REACH = 5.0
"""The same without filters, where tokens further below are compared by their noise, too."""
_ENTRIES = 1 << 13
"""Tokens of a race, whose arrays stay in a core's second cache."""


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
    (token,) = certain_tokens([logits], [params], [at])
    return reference_token(logits, params, at) if token is None else token


def certain_tokens(rows: Sequence[Row], params: Sequence[SamplingParams], at: Sequence[int]) -> list[int | None]:
    """Return the token of each row, sampled or greedy; None where it is not certain without the reference.

    rows: logits `[V]` each, after penalties. at: the key of each row's position.
    """
    tokens: list[int | None] = [None] * len(rows)
    heads: dict[int, Head] = {}
    for index, (row, one) in enumerate(zip(rows, params, strict=True)):
        if one.greedy:
            best = int(row.argmax())
            tokens[index] = best if np.isfinite(row[best]) else None
        elif (head := _head_of(row, one, at[index])) is not None:
            heads[index] = head
    for index, token in zip(heads, tokens_among([*heads.values()]), strict=True):
        tokens[index] = token
    return tokens


@dataclass(frozen=True)
class Head:
    """Holds the likeliest tokens of a row; top-k leaves no others, and neither do the other filters if there are any.

    scaled: `[n]`, logits less the greatest one, over the temperature. at: the position's key. total: the probability of
    all tokens over that of the likeliest, with a relative error of less than `slack`. others: all logits `[V]`, where
    any token may win, and the least one of the head's; None where no other token may.
    """

    ids: Ids
    scaled: NDArray[np.float64]
    params: SamplingParams
    at: int
    total: float
    slack: float = SLACK
    others: tuple[Row, float] | None = None


def head_among(ids: Ids, logits: Row, params: SamplingParams, at: int) -> Head | None:
    """Return the tokens that top-k leaves of `ids` `[n]`, ascending, with these logits, and surely of all tokens.

    None if the order of the last ones is not certain.
    """
    top = float(logits.max())
    if not abs(top) <= FAR * params.temperature:
        return None  # also NaN
    scaled = (logits.astype(np.float64) - top) / params.temperature
    order = np.argsort(-scaled, kind="stable")
    ids, scaled = ids[order], scaled[order]
    gaps = abs(scaled - scaled[min(len(scaled), params.top_k) - 1])
    if ((gaps > 0.0) & (gaps <= SLACK)).any():
        return None  # once normalised they may be equal, and then ordered by id
    ids, scaled = ids[: params.top_k], scaled[: params.top_k]
    return Head(ids, scaled, params, at, float(np.exp(scaled).sum()))


def _head_of(row: Row, params: SamplingParams, at: int) -> Head | None:
    """Return the head of a row; None if that is not certain, or would be most of the row."""
    top, temperature, least = float(row.max()), params.temperature, float(np.finfo(row.dtype).min)
    if not abs(top) <= FAR * temperature:
        return None  # also NaN
    if 0 < params.top_k < len(row):
        floor = greatest(row, params.top_k)[1] - 2.0 * SLACK * temperature
        ids = reaching(row, max(floor, least)).nonzero()[0]
        return head_among(ids, row[ids], params, at)
    weights = _weights(row, top, temperature) if params.top_p < 1.0 else None
    total = _sum(weights) if weights is not None else 1.0
    filtered = weights is not None or params.min_p > 0.0
    reaches = (0.01 - math.log(params.min_p),) if params.min_p > 0.0 else _REACHES if filtered else (_OPEN_REACH,)
    for reach in reaches:
        floor = float(row.dtype.type(max(top - reach * temperature, least)))
        ids = reaching(row, floor).nonzero()[0]
        inside = 1.0 if weights is None or params.min_p > 0.0 else float(weights[ids].sum(dtype=np.float64)) / total
        if inside >= min(1.0, params.top_p + _WEIGHT_SLACK):
            scaled = (row[ids].astype(np.float64) - top) / temperature
            return Head(ids, scaled, params, at, total, _WEIGHT_SLACK, None if filtered else (row, floor))
    return None


def _weights(row: Row, top: float, temperature: float) -> NDArray[np.float32]:
    """Return the probability of every token over that of the likeliest, `[V]`, until the thread's next call."""
    each = scratch("weights", len(row), np.float32)
    with np.errstate(over="ignore", under="ignore"):  # of tokens beyond any reach
        np.subtract(row, top, out=each, casting="same_kind")
        np.multiply(each, np.float32(math.log2(math.e) / temperature), out=each)
        if temperature < _COLD:
            np.clip(each, np.float32(-120.0), np.float32(0.0), out=each)  # a third of the time of np.maximum
        np.exp2(each, out=each)  # half of the time of exp
    return each


def _sum(weights: NDArray[np.float32]) -> float:
    """Return the sum by interleaved columns, which is faster than by one, and as precise as _WEIGHT_SLACK wants it."""
    rows = len(weights) // 1024
    columns = weights[: rows * 1024].reshape(rows, 1024).sum(axis=0)
    return float(columns.sum(dtype=np.float64) + weights[rows * 1024 :].sum(dtype=np.float64))


def tokens_among(heads: Sequence[Head]) -> list[int | None]:
    """Return the token of each row, None where it is not certain."""
    ends = np.cumsum([len(head.ids) for head in heads])
    races = groupby(zip(ends, heads, strict=True), key=lambda one: int(one[0]) // _ENTRIES)
    return [token for _, some in races for token in _raced([head for _, head in some])]


def _raced(heads: Sequence[Head]) -> list[int | None]:
    """Return the token of each row, None where it is not certain, by a race of all heads together.

    The winner of a row is the token if the filters leave it. If they do not, they leave none that is less likely
    either, and the others race again.
    """
    tokens: list[int | None] = [None] * len(heads)
    of = np.repeat(np.arange(len(heads)), [len(head.ids) for head in heads])
    """Index of the head to which each entry belongs."""
    ids = np.concatenate([head.ids for head in heads])
    scaled = np.concatenate([head.scaled for head in heads])
    scores = scaled + gumbel(np.array([head.at for head in heads], dtype=np.uint64)[of], ids)
    weights = np.exp(scaled)
    racing = np.arange(len(heads))
    shares = [(head.params.top_p, head.total, head.slack, head.params.min_p) for head in heads]
    top_p, total, slack, min_p = np.array(shares).T
    surely, maybe = (np.where(top_p < 1.0, (top_p + sign * slack) * total, np.inf) for sign in (-1.0, 1.0))
    with np.errstate(divide="ignore"):
        least = np.log(min_p)
    while len(racing):
        starts = np.flatnonzero(np.diff(of, prepend=-1))
        each = np.cumsum(np.diff(of, prepend=of[0]) > 0)  # index among those that are still racing
        best = np.maximum.reduceat(scores, starts)
        rivals = np.add.reduceat(scores >= (best - SLACK)[each], starts, dtype=np.int64)
        winners = np.flatnonzero(scores == best[each])
        winners = winners[np.searchsorted(winners, starts)]
        own = scaled[winners]
        before = np.add.reduceat(np.where(scaled > (own + SLACK)[each], weights, 0.0), starts)
        until = np.add.reduceat(np.where(scaled >= (own - SLACK)[each], weights, 0.0), starts) - weights[winners]
        left = (rivals == 1) & (until < surely[racing]) & (own > least[racing] + SLACK)
        out = (before >= maybe[racing]) | (own < least[racing] - 2.0 * SLACK)
        for index, token, score in zip(
            racing[left].tolist(), ids[winners[left]].tolist(), best[left].tolist(), strict=True
        ):
            tokens[index] = _against_others(heads[index], token, score)
        further = out[each] & (scaled > (own + SLACK)[each])
        of, ids, scaled, scores, weights = (part[further] for part in (of, ids, scaled, scores, weights))
        racing = racing[out]
    return tokens


def _against_others(head: Head, token: int, score: float) -> int | None:
    """Return the token of a row without filters, given the best one of its head with its score; None as usual."""
    if head.others is None:
        return token
    (row, floor), temperature = head.others, head.params.temperature
    top = float(row.max())
    # They are less likely than any token of the head, and need so much more noise.
    ids = ids_above(head.at, len(row), score - (floor - top) / temperature - 2.0 * SLACK)
    ids = ids[row[ids] < floor]
    if not len(ids):
        return token
    scores = (row[ids].astype(np.float64) - top) / temperature + gumbel(head.at, ids)
    best = int(scores.argmax())
    second = max([score, *np.delete(scores, best).tolist()])
    if scores[best] > second + SLACK:
        return int(ids[best])
    return token if scores[best] < score - SLACK else None
