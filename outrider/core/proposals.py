"""Turn a draft's logits into proposals: the tokens that the target would take if its logits were the draft's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.coupling import gumbel, ids_above, position_key
from outrider.core.processors import TokenCounts, greatest, mass_before, penalise
from outrider.core.sampling import SamplingParams
from outrider.core.scratch import reaching

CERTAIN = math.inf
"""Margin of a token that is the only one which may follow: a device takes it as accepted and learns nothing from it."""


@dataclass(frozen=True)
class Proposal:
    """A child that a draft proposes."""

    token: int
    rank: int
    """0 for the best proposal."""
    margin: float
    """Nats by which the best proposal is ahead of the second, or by which another one is behind the best. Acceptance is
    learned by classes of it, so any measure from 0 to about 11 that grows with that distance will do."""


Row = NDArray[np.floating[Any]]

_REACH = 9.0
"""Nats below the best token within which noise may plausibly lift a token to the top; the rest is left out."""
_MAX_CANDIDATES = 256
"""Tokens that are looked at one by one, the most likely ones."""
_RARE = 0.02
"""Probability of all other tokens together at which it does not pay to look for those that noise lifts."""
_SEARCHED = 1 << 15
"""Ids among which these are looked for. Tokenizers number frequent tokens first, and a node has a fraction of a ms."""
_LIFTED = 8
"""The most of these that are proposed or have a margin to what is."""
_NEVER = -100.0
"""A bias with which a token is not proposed among a few: it asks, as in OpenAI's API, for the token not to come."""
_STRIDE = 64
"""One in so many tokens tells how probable the others are."""
_SPACING = 1024
"""Tokens from one run of them to the next."""


def propose(
    logits: Row,
    sampling: SamplingParams,
    key: int,
    position: int,
    counts: TokenCounts,
    path: Sequence[int],
    count: int,
) -> list[Proposal]:
    """Return the `count` best children by log q + g (by log q if sampling is greedy), q after the target's processors.

    logits: `[V]`. key: the session's noise key. position: of the children. counts: of the tokens before.
    path: tokens between these and the children. Exact, except that of less likely tokens than the first
    _MAX_CANDIDATES few are looked for, and their probability is estimated.
    """
    row: Row = penalise(logits, sampling, counts, path) if sampling.penalised else logits  # type: ignore[arg-type]
    ids, values = _likely(row, 1.0 if sampling.greedy else sampling.temperature)
    if not ids.size or values[0] == -np.inf:
        return []  # logits that are no numbers, or of tokens that are all forbidden
    if not sampling.greedy:
        at = position_key(key, position)
        ids, scores = _noisy(row, ids, values, sampling, at)
        order = np.argsort(-scores, kind="stable")[: count + 1]
        ids, values = ids[order], scores[order]
    return _ranked(ids.tolist(), values.tolist(), count)


def _noisy(
    row: Row, ids: NDArray[np.int64], values: Row, sampling: SamplingParams, at: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return ids and log q + g of the likely tokens that the filters leave, and of others that noise lifts above them.

    ids, values: the likely tokens and their logits, greatest first. at: the position's key.
    """
    scaled = values.astype(np.float64) / sampling.temperature
    others, weights = _others(row, scaled, sampling)
    kept, scaled = _filtered(ids, scaled, sampling, float(weights.sum()))
    scores = scaled + gumbel(at, kept)
    inside = float(np.exp(scaled - scaled[0]).sum())
    if len(kept) < len(ids) or weights.sum() <= _RARE * inside:
        return kept, scores
    lifted = ids_above(at, min(len(row), _SEARCHED), float(scores.max() - scaled[-1]))
    lifted = lifted[row[lifted] < values[-1]]
    further = row[lifted] / sampling.temperature
    noisy = further + gumbel(at, lifted)
    best = np.argsort(-noisy)[:_LIFTED]
    if sampling.min_p > 0.0:
        best = best[further[best] >= scaled[0] + math.log(sampling.min_p)]
    if sampling.top_p < 1.0:
        before = inside + (others > further[best, None]) @ weights
        best = best[before < sampling.top_p * (inside + weights.sum())]
    return np.concatenate((kept, lifted[best])), np.concatenate((scores, noisy[best]))


def _others(
    row: Row, scaled: NDArray[np.float64], sampling: SamplingParams
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return a sample of the tokens less likely than those of `scaled`: log q and q over that of the best, `[n]` each.

    Every one stands for _STRIDE tokens. It is empty if the filters leave none of them.
    """
    if len(scaled) < _MAX_CANDIDATES or 0 < sampling.top_k <= _MAX_CANDIDATES:
        return np.empty(0), np.empty(0)
    # Runs of adjacent tokens, evenly spaced: of few pages, and of rare and frequent tokens alike.
    spaced = row[: len(row) // _SPACING * _SPACING].reshape(-1, _SPACING)[:, : _SPACING // _STRIDE]
    others = spaced.ravel().astype(np.float64) / sampling.temperature
    others = others[others < scaled[-1]]
    return others, np.exp(others - scaled[0]) * _STRIDE


def _likely(row: Row, temperature: float) -> tuple[NDArray[np.int64], Row]:
    """Return ids and logits of the tokens within reach of the best, greatest first, at most _MAX_CANDIDATES."""
    top, floor = greatest(row, _MAX_CANDIDATES)
    ids = np.flatnonzero(reaching(row, np.maximum(top - _REACH * temperature, floor)))
    values = row[ids]
    order = np.argsort(-values, kind="stable")[:_MAX_CANDIDATES]
    return ids[order], values[order]


def _filtered(
    ids: NDArray[np.int64], scaled: NDArray[np.float64], sampling: SamplingParams, others: float
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Apply top-k, top-p and min-p to sorted candidates: the target never takes a token that its filters drop.

    others: probability of all other tokens relative to the best one's.
    """
    if sampling.top_k:
        ids, scaled = ids[: sampling.top_k], scaled[: sampling.top_k]
    if sampling.top_p < 1.0:
        p = np.exp(scaled - scaled[0])
        p /= p.sum() + others
        kept = int(np.searchsorted(mass_before(p), sampling.top_p))
        ids, scaled = ids[:kept], scaled[:kept]
    if sampling.min_p > 0.0:
        kept = int(np.searchsorted(-scaled, -(scaled[0] + math.log(sampling.min_p)), side="right"))
        ids, scaled = ids[:kept], scaled[:kept]
    return ids, scaled


def _ranked(ids: list[int], scores: list[float], count: int) -> list[Proposal]:
    """Return proposals with margins; the margin of a single candidate is the whole reach."""
    if not ids:
        return []
    lead = scores[0] - scores[1] if len(scores) > 1 else _REACH
    return [Proposal(ids[i], i, lead if i == 0 else scores[0] - scores[i]) for i in range(min(count, len(ids)))]


def propose_among(
    ids: NDArray[np.int64],
    log_q: NDArray[np.float64],
    sampling: SamplingParams,
    key: int,
    position: int,
    count: int,
) -> list[Proposal]:
    """Return the `count` best children by log q + g (by log q if sampling is greedy) among a few tokens.

    ids: `[n]`. log_q: `[n]`, logarithms of their probability at the session's temperature; what is missing of a sum of
    1 belongs to tokens that are not named. key: the session's noise key. position: of the children. Margins count the
    unnamed tokens as one more candidate, so that a token that was seen once does not seem certain. Tokens with a bias
    of _NEVER are left out; other biases and the penalties are not applied.
    """
    if banned := [token for token, bias in sampling.logit_bias if bias <= _NEVER]:
        wanted = ~np.isin(ids, banned)
        ids, log_q = ids[wanted], log_q[wanted]
    if not ids.size:
        return []
    unnamed = math.log(max(1.0 - float(np.exp(log_q).sum()), math.exp(-_REACH)))
    if sampling.greedy:
        scores = log_q
    else:
        scores = log_q + gumbel(position_key(key, position), ids)
        unnamed += float(np.euler_gamma)  # the mean of Gumbel noise
    order = np.argsort(-scores, kind="stable")[: count + 1]
    proposals = _ranked(ids[order].tolist(), scores[order].tolist(), count)
    lead = max(0.0, min(proposals[0].margin if len(order) > 1 else math.inf, float(scores[order[0]]) - unnamed))
    return [Proposal(proposals[0].token, 0, lead), *proposals[1:]]
