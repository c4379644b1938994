"""What a draft is taught: divergences between the target's distribution p and the draft's q, position by position.

The traffic log keeps p as its K likeliest ids and the mass of all others, so both distributions live on K + 1 bins:
the ids and the rest as one. Every value here is at most (overlap: at least) what the whole vocabulary would give,
and equal to it where the rest is empty.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

LossKind = Literal["kl", "tv", "hybrid"]

LEAST_MASS = 1e-6
"""The target's rest is never taken for less, and where it is no more neither is the draft's: the rest of 64 ids is
often zero up to rounding, and its log is needed."""
NOTHING = -1e4
"""In the place of a listed logit; not -inf: a sum over no id at all would have no gradient."""


@dataclass(frozen=True)
class Divergence:
    """Of n positions, each `[n]`, differentiable with respect to the draft's logits."""

    kl: Tensor
    """KL(p || q) in nats."""
    overlap: Tensor
    """sum min(p, q): the chance that a guess drawn from q is accepted (arXiv 2211.17192). TV(p, q) is 1 - overlap."""


def divergence(logits: Tensor, top_ids: Tensor, top_log_probs: Tensor, tail: Tensor) -> Divergence:
    """Compare the draft's `logits [n, V]` with the target's `top_ids [n, K]`, `top_log_probs [n, K]`, `tail [n]`.

    An id may be -1, with a log-prob of -inf, where the target's list is shorter than K.
    """
    listed = top_ids >= 0
    total = logits.logsumexp(1)  # not log_softmax: of a large vocabulary every copy of the logits counts
    log_q = logits.gather(1, top_ids.clamp_min(0)) - total[:, None]
    p = torch.where(listed, top_log_probs.exp(), 0.0)
    q = torch.where(listed, log_q.exp(), 0.0)
    p_rest = tail.clamp_min(LEAST_MASS)
    log_q_rest = _log_rest(logits, top_ids, listed) - total
    # A draft that leaves the rest too little must feel it, however little: only where the target leaves none it may.
    log_q_rest = torch.where(tail > LEAST_MASS, log_q_rest, log_q_rest.clamp_min(math.log(LEAST_MASS)))
    q_rest = log_q_rest.exp()
    # p log p is 0 at p = 0, and -inf - log q must not become NaN there.
    log_ratio = torch.where(p > 0, top_log_probs - log_q, 0.0)
    kl = (p * log_ratio).sum(1) + p_rest * (p_rest.log() - log_q_rest)
    overlap = torch.minimum(p, q).sum(1) + torch.minimum(p_rest, q_rest)
    return Divergence(kl, overlap)


def _log_rest(logits: Tensor, top_ids: Tensor, listed: Tensor) -> Tensor:
    """Logsumexp `[n]` of all logits but the listed ones: summed, since 1 minus the others has no digits."""
    named = torch.where(listed, top_ids, top_ids[:, :1])  # the likeliest one is always listed
    return logits.scatter(1, named, NOTHING).logsumexp(1)


def loss(found: Divergence, kind: LossKind, alpha: float, eta: float) -> Tensor:
    """Return the loss of each position, `[n]`.

    `hybrid` is w KL + (1 - w) TV with w = exp(-eta alpha) (arXiv 2602.23881). alpha: the mean overlap so far, a
    constant here. A draft that is far off learns by KL, which pulls hard where q has no mass; one that is near by the
    acceptance itself.
    """
    if kind == "kl":
        return found.kl
    if kind == "tv":
        return 1 - found.overlap
    weight = kl_weight(alpha, eta)
    return weight * found.kl + (1 - weight) * (1 - found.overlap)


def kl_weight(alpha: float, eta: float) -> float:
    """How much of the hybrid is KL, in (0, 1]."""
    return math.exp(-eta * alpha)
