"""Test the losses against the whole distribution, and their gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from cloud_verifier.distill.training.losses import divergence, loss
from cloud_verifier.distill.training.plan import LossKind

V = 12


def logits_pair(rows: int = 5) -> tuple[Tensor, Tensor]:
    """Return logits of target and draft, in double precision."""
    generator = torch.Generator().manual_seed(4)
    both = 2 * torch.randn(2, rows, V, generator=generator, dtype=torch.float64)
    return both[0], both[1]


def kept(target: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return what the log keeps of a target: ids, log-probs, tail."""
    log_probs, ids = target.log_softmax(-1).topk(top)
    return ids, log_probs, (1 - log_probs.exp().sum(1)).clamp_min(0)


def merged(p: Tensor, ids: Tensor) -> Tensor:
    """Return the dense distribution with all ids but the listed ones merged into one."""
    listed = p.gather(1, ids)
    return torch.cat([listed, (1 - listed.sum(1, keepdim=True))], dim=1)


@pytest.mark.parametrize("top", [3, V - 1])
def test_kl_and_overlap_are_those_of_the_distributions_with_the_rest_as_one(top: int) -> None:
    target, draft = logits_pair()
    ids, log_probs, tail = kept(target, top)
    kl, overlap = divergence(draft, ids, log_probs, tail)
    p, q = merged(target.softmax(-1), ids), merged(draft.softmax(-1), ids)
    torch.testing.assert_close(kl, (p * (p / q).log()).sum(1))
    torch.testing.assert_close(overlap, torch.minimum(p, q).sum(1))


def test_a_draft_that_is_the_target_has_no_divergence_and_no_gradient() -> None:
    target, _ = logits_pair()
    draft = target.clone().requires_grad_()
    kl, overlap = divergence(draft, *kept(target, 4))
    torch.testing.assert_close(kl, torch.zeros_like(kl), atol=1e-9, rtol=0)
    torch.testing.assert_close(overlap, torch.ones_like(overlap))
    kl.sum().backward()
    assert draft.grad is not None and draft.grad.abs().max() < 1e-6


def test_a_certain_target_and_a_certain_wrong_draft_give_finite_values_and_gradients() -> None:
    ids = torch.tensor([[0, 1]])
    draft = torch.full((1, V), -200.0).index_fill(1, torch.tensor([5]), 200.0).requires_grad_()
    kl, _ = divergence(draft, ids, torch.tensor([[0.0, -math.inf]]), torch.zeros(1))
    kl.sum().backward()
    assert kl.isfinite().all() and kl > 100
    assert draft.grad is not None and draft.grad.isfinite().all() and draft.grad[0, 0] < -0.9


@pytest.mark.parametrize("kind", ["kl", "tv"])
def test_gradients_are_those_of_finite_differences(kind: LossKind) -> None:
    target, draft = logits_pair()
    ids, log_probs, tail = kept(target, 4)

    def total(logits: Tensor) -> Tensor:
        kl, overlap = divergence(logits, ids, log_probs, tail)
        sums = torch.stack((torch.ones_like(kl), kl, overlap), dim=1)
        return loss(sums, kind)

    assert torch.autograd.gradcheck(total, draft.requires_grad_())


def test_the_hybrid_is_kl_at_first_and_leaves_it_as_acceptance_grows() -> None:
    for overlap in (0.0, 0.25, 1.0):
        sums = torch.tensor([[2.0, 3.0, 1.5 * overlap], [1.0, 0.5, 1.5 * overlap]], requires_grad=True)
        weight = math.exp(-overlap)
        hybrid = loss(sums, "hybrid")
        torch.testing.assert_close(hybrid, torch.tensor(weight * 3.5 + (1 - weight) * 3 * (1 - overlap)))
        (slopes,) = torch.autograd.grad(hybrid, sums)
        torch.testing.assert_close(slopes[0, 1:], torch.tensor([weight, weight - 1]))  # the weight is a constant
