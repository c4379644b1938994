"""Compute the training losses: divergences between the target's distribution p and the draft's q at each position.

The traffic log keeps p as its K likeliest ids and the probability of all other ids together, so both distributions are
compared on K + 1 bins. Every KL is at most, and every overlap at least, the one over the whole vocabulary, and they are
equal where the last bin is empty.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from cloud_verifier.distill.training.plan import LossKind

LISTED, SAMPLED = 16, 2_000
"""Likeliest ids of each position that are compared one by one, and random ids that stand for all others."""

ROWS = 1_024
"""Positions that are compared at a time: with all columns of a large vocabulary each takes up to a megabyte."""
MIN_TAIL = 1e-6
"""Least probability that the target's tail counts as, and the draft's too where the target has no more. The tail of 64
ids is often zero up to rounding, and its logarithm is needed."""
MASKED_LOGIT = -1e4
"""Replaces listed logits in the tail's sum. It is finite because a logsumexp over -inf alone has no gradient."""


class OutputColumns:
    """The columns of the output layer that labelled positions are compared on, and the target's distributions there.

    Where the vocabulary is large most of a training step would be spent on it. If `sampled`, the target's LISTED
    likeliest ids of all positions are compared, and of the others SAMPLED random ones stand for all (arXiv 1412.2007).
    """

    def __init__(self, layer: nn.Linear, target: tuple[Tensor, Tensor, Tensor], *, sampled: bool) -> None:
        """Choose the columns of `layer`, whose weight is `[V, H]`. target: as in `divergence`, of all n positions."""
        self.top_ids, self.top_log_probs, self.tail = target
        self._weight: Tensor = layer.weight
        self._bias: Tensor | None = layer.bias
        ids = self.top_ids[:, :LISTED]
        listed = torch.unique(ids[ids >= 0])
        count, device = len(layer.weight), layer.weight.device
        if not sampled or len(listed) + SAMPLED >= count:
            return
        place = torch.full((count,), -1, device=device)
        place[listed] = torch.arange(len(listed), device=device)
        others = (place < 0).nonzero()[:, 0]
        columns = torch.cat((listed, others[torch.randint(len(others), (SAMPLED,), device=device)]))
        self._weight = layer.weight[columns]
        bias = torch.zeros(len(columns), device=device) if layer.bias is None else layer.bias[columns]
        stands_for = torch.zeros(len(columns), device=device)
        stands_for[len(listed) :] = math.log(len(others) / SAMPLED)
        self._bias = bias + stands_for
        self.tail = self.tail + self.top_log_probs[:, LISTED:].exp().sum(1)
        self.top_log_probs = self.top_log_probs[:, :LISTED]
        self.top_ids = torch.where(ids >= 0, place[ids.clamp_min(0)], -1)

    def divergence(self, states: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return what `divergence` does for states `[n, H]`. rows: `[n]`, their positions; None for all."""
        target = self.top_ids, self.top_log_probs, self.tail
        if rows is not None:
            target = self.top_ids[rows], self.top_log_probs[rows], self.tail[rows]
        parts = [
            divergence(self._logits(states[at : at + ROWS]), *(one[at : at + ROWS] for one in target))
            for at in range(0, max(1, len(states)), ROWS)
        ]
        return torch.cat([kl for kl, _ in parts]), torch.cat([overlap for _, overlap in parts])

    def _logits(self, states: Tensor) -> Tensor:
        return functional.linear(states.to(self._weight.dtype), self._weight, self._bias).float()


def divergence(logits: Tensor, top_ids: Tensor, top_log_probs: Tensor, tail: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(p || q) in nats and the overlap of p and q, each `[n]` and differentiable.

    The overlap sum min(p, q) is the probability that a token drawn from q is accepted (arXiv 2211.17192), and total
    variation is one minus it. logits: the draft's, `[n, V]`. The target's are `top_ids [n, K]`, `top_log_probs [n, K]`
    and `tail [n]`; an id of -1, with a log-probability of -inf, marks the end of a list shorter than K.
    """
    listed = top_ids >= 0
    scores = torch.where(listed, logits.gather(1, top_ids.clamp_min(0)), MASKED_LOGIT)
    tail_score = _log_tail(logits, top_ids, listed)
    total = torch.logaddexp(scores.logsumexp(1), tail_score)  # the logits are many: they are summed once
    log_q = scores - total[:, None]
    p = torch.where(listed, top_log_probs.exp(), 0.0)
    q = torch.where(listed, log_q.exp(), 0.0)
    p_tail = tail.clamp_min(MIN_TAIL)
    log_q_tail = tail_score - total
    # The clamp removes the gradient, so it applies only where the target has no tail that the draft could miss.
    log_q_tail = torch.where(tail > MIN_TAIL, log_q_tail, log_q_tail.clamp_min(math.log(MIN_TAIL)))
    q_tail = log_q_tail.exp()
    # p log p is 0 at p = 0, where -inf - log q would become NaN.
    log_ratio = torch.where(p > 0, top_log_probs - log_q, 0.0)
    kl = (p * log_ratio).sum(1) + p_tail * (p_tail.log() - log_q_tail)
    overlap = torch.minimum(p, q).sum(1) + torch.minimum(p_tail, q_tail)
    return kl, overlap


def _log_tail(logits: Tensor, top_ids: Tensor, listed: Tensor) -> Tensor:
    """Return the logsumexp `[n]` of all unlisted logits, summed since 1 minus the listed ones has no digits left."""
    masked = torch.where(listed, top_ids, top_ids[:, :1])  # the likeliest id is always listed
    return logits.scatter(1, masked, MASKED_LOGIT).logsumexp(1)


def sums_of_texts(labelled: Tensor, values: Tensor) -> Tensor:
    """Return sums `[b, m]` over each text's labelled positions: of `values` `[m, n]`, with `labelled` `[b, L]`."""
    sums = torch.zeros(len(labelled), len(values), device=values.device)
    return sums.index_add(0, labelled.nonzero()[:, 0], values.T)


def loss(sums: Tensor, kind: LossKind) -> Tensor:
    """Return the sum of the losses of some texts' positions. sums: `[b, 3]`, of positions, KL and overlap.

    `hybrid` is w KL + (1 - w) TV with w = exp(-acceptance) (arXiv 2602.23881, eta 1), where acceptance is the mean
    overlap, a constant here. A draft that is far from the target learns by KL, which has a gradient where q has no
    mass; one that is near learns by acceptance itself.
    """
    count, kl, overlap = sums.sum(0).unbind()
    if kind == "hybrid":
        weight = torch.exp(-overlap.detach() / count.clamp_min(1))
        return weight * kl + (1 - weight) * (count - overlap)
    return kl if kind == "kl" else count - overlap
