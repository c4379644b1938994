"""Accept drafted tokens by rules that compare p with q, as arms beside our own rule, which needs no q.

p and q are the distributions `[V]` of target and draft at one position. Every rule returns a token that has the
distribution p exactly, if the drafted tokens are drawn as it says; what differs is how often that is a drafted one.
`acceptance` computes that share without drawing, where there is a formula for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Distribution = NDArray[np.float64]
Rule = Callable[[Distribution, Distribution, Sequence[int], np.random.Generator], int]
"""(p, q, drafted tokens, generator of noise that the draft does not know) -> the token that is committed"""

_STEPS = 60
"""Bisections that find the division factor of `k_sequential` as precisely as float64 has it."""


def leviathan(p: Distribution, q: Distribution, drafted: Sequence[int], rng: np.random.Generator) -> int:
    """Return a token by speculative sampling (arXiv 2211.17192). drafted: one token, drawn from q."""
    return multi_step(p, q, drafted[:1], rng)


def multi_step(p: Distribution, q: Distribution, drafted: Sequence[int], rng: np.random.Generator) -> int:
    """Return a token by SpecInfer's multi-step speculative sampling (arXiv 2305.09781, algorithm 2).

    drafted: any number of tokens, each drawn from q by itself. After a rejection p is what is left of it above q.
    """
    for token in drafted:
        if rng.random() * q[token] < p[token]:
            return int(token)
        p = _residual(p, q)
    return int(rng.choice(len(p), p=p))


def without_replacement(p: Distribution, q: Distribution, drafted: Sequence[int], rng: np.random.Generator) -> int:
    """Return a token by recursive rejection sampling (arXiv 2402.14160).

    drafted: distinct tokens, each drawn from q without the ones before, renormalised.
    """
    for token in drafted:
        if rng.random() * q[token] < p[token]:
            return int(token)
        p, q = _residual(p, q), _without(q, token)
    return int(rng.choice(len(p), p=p))


def k_sequential(p: Distribution, q: Distribution, drafted: Sequence[int], rng: np.random.Generator) -> int:
    """Return a token by SpecTr's k-sequential selection (arXiv 2310.15141, algorithm 2).

    drafted: k tokens, each drawn from q by itself.
    """
    count = len(drafted)
    rho = division_factor(p, q, count)
    for token in drafted:
        if rng.random() * rho * q[token] < p[token]:
            return int(token)
    return int(rng.choice(len(p), p=_k_sequential_residual(p, q, rho, count)))


def division_factor(p: Distribution, q: Distribution, count: int) -> float:
    """Return SpecTr's rho for `count` drafts: the least one, from 1 to `count`, that leaves p unbiased.

    It solves 1 - (1 - beta)^k = rho * beta, where beta = sum(min(q, p / rho)) is how likely one draft is accepted.
    """
    low, high = 1.0, float(count)
    for _ in range(_STEPS if count > 1 else 0):
        rho = (low + high) / 2
        beta = _accepts(p, q, rho)
        if 1.0 - (1.0 - beta) ** count > rho * beta:
            low = rho
        else:
            high = rho
    return high


def acceptance(rule: str, p: Distribution, q: Distribution, count: int) -> float:
    """Return the probability that the committed token is one of `count` drafted ones.

    rule: "leviathan", "multi_step", "k_sequential"; or "bound": the most that any rule can have with tokens that are
    each drawn from q by itself and leave p unbiased.
    """
    if rule == "bound":
        return _bound(p, q, count)
    if rule == "k_sequential":
        return 1.0 - (1.0 - _accepts(p, q, division_factor(p, q, count))) ** count
    refused = 1.0
    for _ in range(1 if rule == "leviathan" else count):
        refused *= 1.0 - float(np.minimum(p, q).sum())
        p = _residual(p, q)
    return 1.0 - refused


def draw(q: Distribution, count: int, rng: np.random.Generator, *, replacement: bool) -> list[int]:
    """Return `count` tokens drawn from q; without replacement fewer, if q has no more."""
    if not replacement:
        count = min(count, int(np.count_nonzero(q)))
    drawn: list[int] = rng.choice(len(q), size=count, replace=replacement, p=q).tolist()
    return drawn


def _accepts(p: Distribution, q: Distribution, rho: float) -> float:
    return float(np.minimum(q, p / rho).sum())


def _k_sequential_residual(p: Distribution, q: Distribution, rho: float, count: int) -> Distribution:
    """Return what is left of p once its share was accepted by k-sequential selection, normalised."""
    accepted = np.minimum(q, p / rho)
    beta = float(accepted.sum())
    share = (1.0 - (1.0 - beta) ** count) / beta if beta > 0.0 else 0.0
    return _normalised(np.maximum(p - accepted * share, 0.0), p)


def _residual(p: Distribution, q: Distribution) -> Distribution:
    """Return max(p - q, 0), normalised."""
    return _normalised(np.maximum(p - q, 0.0), p)


def _without(q: Distribution, token: int) -> Distribution:
    """Return q without a token, normalised."""
    left = q.copy()
    left[token] = 0.0
    return _normalised(left, q)


def _normalised(weights: Distribution, otherwise: Distribution) -> Distribution:
    """Return the weights with a sum of 1; `otherwise` if rounding alone has left something, which is never needed."""
    total = weights.sum()
    return weights / total if total > 1e-12 else otherwise


def _bound(p: Distribution, q: Distribution, count: int) -> float:
    """Return the value of the optimal transport between p and `count` independent drafts (arXiv 2310.15141).

    It is a maximum flow from the sets of drafts to the tokens in them, and so the least cut: the minimum over all sets
    T of p(T) + 1 - q(T)^k. That is concave in (p(T), q(T)), so the minimum is at a set of all tokens above some q / p.
    """
    order = np.argsort(-(q / np.maximum(p, 1e-300)), kind="stable")
    inside_p, inside_q = np.cumsum(p[order]), np.minimum(np.cumsum(q[order]), 1.0)
    return float(min(1.0, (inside_p + 1.0 - inside_q**count).min()))


RULES: dict[str, tuple[Rule, bool]] = {
    "leviathan": (leviathan, True),
    "multi_step": (multi_step, True),
    "k_sequential": (k_sequential, True),
    "without_replacement": (without_replacement, False),
}
"""Name -> (rule, whether its drafted tokens may repeat)"""
