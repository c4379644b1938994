"""Turn a draft's logits into proposals: the tokens that the target would take if its logits were the draft's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.coupling import gumbel, position_key
from outrider.core.processors import TokenCounts, mass_before, penalise
from outrider.core.sampling import SamplingParams


@dataclass(frozen=True)
class Proposal:
    """A child that a draft proposes."""

    token: int
    rank: int
    """0 for the best proposal."""
    margin: float
    """Nats by which the best proposal is ahead of the second, or by which another one is behind the best."""


Row = NDArray[np.floating[Any]]

_REACH = 9.0
"""Nats below the best token within which noise may plausibly lift a token to the top; the rest is left out."""
_MAX_CANDIDATES = 256
"""A distribution so flat that more tokens are within reach has no good proposals anyway."""


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

    logits: `[V]`. key: the session's noise key. position: of the children. counts: occurrences in prompt and output.
    path: tokens between these and the children. Exact for the best tokens, except that `_likely` preselects.
    """
    row: Row = penalise(logits, sampling, counts, path) if sampling.penalised else logits  # type: ignore[arg-type]
    ids, values = _likely(row, 1.0 if sampling.greedy else sampling.temperature)
    if not ids.size:
        return []  # logits that are no numbers
    if not sampling.greedy:
        ids, scores = _filtered(ids, values.astype(np.float64) / sampling.temperature, sampling)
        scores = scores + gumbel(position_key(key, position), ids)
        order = np.argsort(-scores, kind="stable")[: count + 1]
        ids, values = ids[order], scores[order]
    return _ranked(ids.tolist(), values.tolist(), count)


def _likely(row: Row, temperature: float) -> tuple[NDArray[np.int64], Row]:
    """Return ids and logits of the tokens within reach of the best, greatest first, at most _MAX_CANDIDATES."""
    top = row.max()
    ids = np.flatnonzero(row >= top - _REACH * temperature)
    if ids.size > _MAX_CANDIDATES:  # halve the reach first: a partition of many ids costs as much as a draft's decode
        ids = np.flatnonzero(row >= top - _REACH / 2 * temperature)
    if ids.size > _MAX_CANDIDATES:
        ids = ids[np.argpartition(row[ids], -_MAX_CANDIDATES)[-_MAX_CANDIDATES:]]
        ids.sort()
    values = row[ids]
    order = np.argsort(-values, kind="stable")
    return ids[order], values[order]


def _filtered(
    ids: NDArray[np.int64], scaled: NDArray[np.float64], sampling: SamplingParams
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Apply top-k, top-p and min-p to sorted candidates: the target never takes a token that its filters drop."""
    if sampling.top_k:
        ids, scaled = ids[: sampling.top_k], scaled[: sampling.top_k]
    if sampling.top_p < 1.0:
        p = np.exp(scaled - scaled[0])
        p /= p.sum()
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
