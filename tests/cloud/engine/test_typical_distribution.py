"""Test by chi-square that typical acceptance leaves the distribution which it defines, with a threshold that
depends on the entropy or a fixed one, and that other rules do not.

A source proposes the same two children everywhere, of a vocabulary of four; three tokens are committed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
from chi_square import Prefix, joint, p_value

from cloud_verifier.engine.sampling import Sampler
from outrider.core.processors import surviving_log_probs
from outrider.core.sampling import MAX_DELTA, SamplingParams, TypicalAcceptance
from outrider.core.verification import TreeBatch, verify

IDS = np.arange(4)
LENGTH = 3
SEEDS = 4_000
PARAMS = SamplingParams(temperature=0.9, top_p=0.98)
RULES = {"typical": TypicalAcceptance(0.22, 0.6), "a fixed threshold": TypicalAcceptance(0.22, MAX_DELTA)}
"""The second one is BiLD's rollback."""
CHILDREN = (3, 1)
Take = Callable[[TypicalAcceptance, np.ndarray, int, np.random.Generator], int]
"""(the rule that it should be, p, the target's own token, a generator of other noise) -> the token that is taken"""


@cache
def logits_at(prefix: Prefix) -> np.ndarray:
    return np.random.default_rng([3, len(prefix), *prefix]).normal(0.0, 1.3, 4)


@cache
def p_at(prefix: Prefix) -> np.ndarray:
    ids, log_p = surviving_log_probs(logits_at(prefix), PARAMS)
    p = np.zeros(4)
    p[ids] = np.exp(log_p)
    return p / p.sum()


def threshold(p: np.ndarray, rule: TypicalAcceptance) -> float:
    left = p[p > 0]
    return min(rule.epsilon, rule.delta * math.exp(float((left * np.log(left)).sum())))


def defined(p: np.ndarray, rule: TypicalAcceptance) -> np.ndarray:
    """Return the distribution of the token that the rule takes, by its definition alone."""
    best = max(sorted(CHILDREN), key=lambda token: p[token])
    if p[best] <= threshold(p, rule):
        return p
    taken = np.where(np.isin(IDS, CHILDREN), p, 0.0)
    taken[best] += 1.0 - taken.sum()
    return taken


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
    take: Callable[[np.ndarray, int, np.random.Generator], int] | None,
    rng: np.random.Generator,
    row: int,
    path: Sequence[int],
) -> int:
    """Return what the engine's sampler takes after a row, or what another rule does with the target's own token."""
    prefix = (*before, *path)
    if take is None:
        return sampler.choose(logits_at(prefix), len(prefix), path, children[row])
    return take(p_at(prefix), sampler.choose(logits_at(prefix), len(prefix), path), rng)


def sequences(rule: TypicalAcceptance, take: Take | None = None) -> list[Prefix]:
    """Return a sequence of each seed, by the engine's sampler, or by another rule on its own tokens."""
    batch, drawn, other = tree(), [], partial(take, rule) if take else None
    children = batch.children
    for seed in range(SEEDS):
        committed: Prefix = ()
        rng = np.random.default_rng(seed)
        sampler = Sampler(replace(PARAMS, seed=seed, typical=rule), (4, 2))
        while len(committed) < LENGTH:
            choose = partial(token, sampler, committed, children, other, rng)
            verified = verify(replace(batch, position=len(committed)), choose, lambda _, at: at + 1 >= LENGTH)
            committed = (*committed, *verified.tokens)
        drawn.append(committed)
    return drawn


def p_of(rule: TypicalAcceptance, take: Take | None = None) -> float:
    """Return the p-value of the sequences against the rule's own distribution."""
    return p_value(sequences(rule, take), joint(lambda prefix: defined(p_at(prefix), rule), LENGTH))


def another_threshold(rule: TypicalAcceptance, p: np.ndarray, own: int, rng: np.random.Generator) -> int:
    """Compare, wrongly, with epsilon alone, or for a fixed threshold with one that depends on the entropy."""
    other = replace(rule, delta=0.3 if rule.delta == MAX_DELTA else MAX_DELTA)
    best = max(CHILDREN, key=lambda token: p[token])
    return best if own not in CHILDREN and p[best] > threshold(p, other) else own


def first_child(rule: TypicalAcceptance, p: np.ndarray, own: int, rng: np.random.Generator) -> int:
    """Take, wrongly, the first child above the threshold, not the likeliest."""
    return own if own in CHILDREN else next((token for token in CHILDREN if p[token] > threshold(p, rule)), own)


def drawn_again(rule: TypicalAcceptance, p: np.ndarray, own: int, rng: np.random.Generator) -> int:
    """Draw, wrongly, another token of the target after a rejection."""
    best = max(CHILDREN, key=lambda token: p[token])
    return own if own in CHILDREN else best if p[best] > threshold(p, rule) else int(rng.choice(4, p=p))


def own_last(rule: TypicalAcceptance, p: np.ndarray, own: int, rng: np.random.Generator) -> int:
    """Take, wrongly, the likeliest child before the target's own token."""
    best = max(CHILDREN, key=lambda token: p[token])
    return best if p[best] > threshold(p, rule) else own


@pytest.mark.parametrize("name", RULES)
def test_the_tokens_have_the_distribution_that_the_rule_defines(name: str) -> None:
    assert p_of(RULES[name]) > 1e-3


@pytest.mark.parametrize(
    "wrong", [another_threshold, first_child, drawn_again, own_last], ids=lambda wrong: wrong.__name__
)
def test_a_rule_that_is_a_little_different_is_rejected(wrong: Take) -> None:
    assert p_of(RULES["typical"], wrong) < 1e-6
