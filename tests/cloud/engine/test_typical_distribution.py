"""Test by chi-square that typical acceptance leaves the distribution which it defines, and that other rules do not.

A source proposes the same two children everywhere, of a vocabulary of four; three tokens are committed.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
from scipy import stats

from cloud_verifier.engine.sampling import Sampler
from outrider.core.processors import surviving_log_probs
from outrider.core.sampling import SamplingParams, TypicalAcceptance
from outrider.core.verification import TreeBatch, verify

IDS = np.arange(4)
LENGTH = 3
SEEDS = 4_000
PARAMS = SamplingParams(temperature=0.9, top_p=0.98, typical=TypicalAcceptance(0.22, 0.6))
CHILDREN = (3, 1)
Prefix = tuple[int, ...]
Take = Callable[[Prefix, np.ndarray, int, np.random.Generator], int]
"""(prefix, p, the target's own token, generator of the rule's own noise) -> the token that is taken"""


@cache
def logits_at(prefix: Prefix) -> np.ndarray:
    return np.random.default_rng([16, len(prefix), *prefix]).normal(0.0, 1.3, 4)


@cache
def p_at(prefix: Prefix) -> np.ndarray:
    ids, log_p = surviving_log_probs(logits_at(prefix), PARAMS)
    p = np.zeros(4)
    p[ids] = np.exp(log_p)
    return p / p.sum()


def defined(p: np.ndarray, rule: TypicalAcceptance) -> np.ndarray:
    """Return the distribution of the token that the rule takes, by its definition alone."""
    left = p[p > 0]
    threshold = min(rule.epsilon, rule.delta * math.exp(float((left * np.log(left)).sum())))
    best = max(sorted(CHILDREN), key=lambda token: p[token])
    if p[best] <= threshold:
        return p
    taken = np.where(np.isin(IDS, CHILDREN), p, 0.0)
    taken[best] += 1.0 - taken.sum()
    return taken


def p_value(drawn: Sequence[Prefix]) -> float:
    """Return the p-value of chi-square against the rule's own distribution, with rare cells merged."""
    assert PARAMS.typical is not None
    every = list(itertools.product(range(4), repeat=LENGTH))
    exact = [math.prod(defined(p_at(w[:at]), PARAMS.typical)[w[at]] for at in range(LENGTH)) for w in every]
    expected, counted = len(drawn) * np.array(exact), Counter(drawn)
    observed = np.array([counted[whole] for whole in every])
    if observed[expected == 0].any():
        return 0.0
    rare = (expected > 0) & (expected < 5)
    cells = [(observed[at], expected[at]) for at in np.flatnonzero(expected >= 5)]
    if rare.any():
        cells.append((observed[rare].sum(), expected[rare].sum()))
    counts = np.array(cells)
    return float(stats.chisquare(counts[:, 0], counts[:, 1]).pvalue)


def tree() -> TreeBatch:
    """Return two children of each row, three levels deep."""
    parents: list[int] = []
    tokens: list[int] = []
    depths: list[int] = []
    level = [0]
    for depth in range(1, LENGTH + 1):
        below = []
        for row, token in itertools.product(level, CHILDREN):
            parents.append(row)
            tokens.append(token)
            depths.append(depth)
            below.append(len(tokens))
        level = below
    return TreeBatch(tuple(range(1, len(tokens) + 1)), tuple(parents), tuple(tokens), tuple(depths), 0)


def token(
    sampler: Sampler,
    before: Prefix,
    children: list[list[int]],
    take: Take | None,
    rng: np.random.Generator,
    row: int,
    path: Sequence[int],
) -> int:
    """Return what the engine's sampler takes after a row, or what another rule does with the target's own token."""
    prefix = (*before, *path)
    if take is None:
        return sampler.choose(logits_at(prefix), len(prefix), path, children[row])
    return take(prefix, p_at(prefix), sampler.choose(logits_at(prefix), len(prefix), path), rng)


def sequences(take: Take | None) -> list[Prefix]:
    """Return a sequence of each seed, by the engine's sampler, or by another rule on its own tokens."""
    batch, drawn = tree(), []
    children = batch.children
    for seed in range(SEEDS):
        committed: Prefix = ()
        rng = np.random.default_rng(seed)
        sampler = Sampler(SamplingParams(temperature=0.9, top_p=0.98, seed=seed, typical=PARAMS.typical), (4, 2))
        while len(committed) < LENGTH:
            choose = partial(token, sampler, committed, children, take, rng)
            verified = verify(replace(batch, position=len(committed)), choose, lambda _, at: at + 1 >= LENGTH)
            committed = (*committed, *verified.tokens)
        drawn.append(committed)
    return drawn


def first_child(prefix: Prefix, p: np.ndarray, own: int, rng: np.random.Generator) -> int:
    """Take, wrongly, the first child above the threshold, not the likeliest."""
    rule = TypicalAcceptance(0.22, 0.6)
    left = p[p > 0]
    threshold = min(rule.epsilon, rule.delta * math.exp(float((left * np.log(left)).sum())))
    return own if own in CHILDREN else next((token for token in CHILDREN if p[token] > threshold), own)


def without_entropy(prefix: Prefix, p: np.ndarray, own: int, rng: np.random.Generator) -> int:
    """Compare, wrongly, with epsilon alone."""
    best = max(CHILDREN, key=lambda token: p[token])
    return best if own not in CHILDREN and p[best] > 0.22 else own


def drawn_again(prefix: Prefix, p: np.ndarray, own: int, rng: np.random.Generator) -> int:
    """Draw, wrongly, another token of the target after a rejection."""
    taken = without_entropy(prefix, p, own, rng)
    return int(rng.choice(4, p=p)) if taken == own and own not in CHILDREN else taken


def own_last(prefix: Prefix, p: np.ndarray, own: int, rng: np.random.Generator) -> int:
    """Take, wrongly, the likeliest child before the target's own token."""
    best = max(CHILDREN, key=lambda token: p[token])
    return best if p[best] > 0.22 else own


def test_the_tokens_have_the_distribution_that_the_rule_defines() -> None:
    assert p_value(sequences(None)) > 1e-3


@pytest.mark.parametrize("wrong", [first_child, without_entropy, drawn_again, own_last], ids=lambda rule: rule.__name__)
def test_a_rule_that_is_a_little_different_is_rejected(wrong: Take) -> None:
    assert p_value(sequences(wrong)) < 1e-6
