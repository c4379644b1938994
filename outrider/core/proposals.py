"""From a draft's logits to proposals: the tokens that the target would take if it thought as the draft does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.counts import TokenCounts
from outrider.core.coupling import gumbel, position_key
from outrider.core.processors import mass_before, penalise
from outrider.core.sampling import SamplingParams


@dataclass(frozen=True)
class Proposal:
    """A child that a draft proposes."""

    token: int
    rank: int
    """0 is the draft's first guess."""
    margin: float
    """In nats: the first guess's lead over the second, or how far the others are behind the first."""


Row = NDArray[np.floating[Any]]

_REACH = 9.0
"""Nats below the best token within which noise may plausibly lift one to the top; the rest is not looked at."""
_MOST = 256
"""Tokens looked at, at most: a flat distribution has no good guesses anyway."""


def propose(
    logits: Row,
    sampling: SamplingParams,
    key: int,
    position: int,
    counts: TokenCounts,
    path: Sequence[int],
    count: int,
) -> list[Proposal]:
    """The `count` best children by log q + g (by log q where greedy), q after the target's processors.

    logits: `[V]`. key: the session's noise key. position: the children's. counts: occurrences in prompt and output;
    path: tokens between them and the children. Exact for the best tokens but for what preselection leaves out.
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
    """Ids and logits of the tokens within reach of the best, greatest first, at most _MOST."""
    top = row.max()
    ids = np.flatnonzero(row >= top - _REACH * temperature)
    if ids.size > _MOST:  # nearer ones first: a partition of the whole row costs as much as a small draft's decode
        ids = np.flatnonzero(row >= top - _REACH / 2 * temperature)
    if ids.size > _MOST:
        ids = ids[np.argpartition(row[ids], -_MOST)[-_MOST:]]
        ids.sort()
    values = row[ids]
    order = np.argsort(-values, kind="stable")
    return ids[order], values[order]


def _filtered(
    ids: NDArray[np.int64], scaled: NDArray[np.float64], sampling: SamplingParams
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Top-k, top-p and min-p on sorted candidates: a token that the target's filter drops is a guess lost."""
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
    """Proposals with margins; a lone candidate is ahead of nothing by the whole reach."""
    if not ids:
        return []
    lead = scores[0] - scores[1] if len(scores) > 1 else _REACH
    behind = [scores[0] - score for score in scores]
    return [Proposal(ids[i], i, lead if i == 0 else behind[i]) for i in range(min(count, len(ids)))]
