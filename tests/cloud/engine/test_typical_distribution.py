"""Test by chi-square that typical acceptance leaves the distribution which it defines, with a threshold that
depends on the entropy or a fixed one.

A source proposes the same two children everywhere, of a vocabulary of four; three tokens are committed.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
from chi_square import Prefix, joint, p_value
from single_walk import verify

from cloud_verifier.engine.sampling import Sampler
from outrider.core.processors import surviving_log_probs
from outrider.core.sampling import MAX_DELTA, SamplingParams, TypicalAcceptance
from outrider.core.verification import TreeBatch

IDS = np.arange(4)
LENGTH = 3
SEEDS = 4_000 if os.environ.get("OUTRIDER_NIGHTLY") else 1_000
PARAMS = SamplingParams(temperature=0.9, top_p=0.98)
RULES = {"typical": TypicalAcceptance(0.22, 0.6), "a fixed threshold": TypicalAcceptance(0.22, MAX_DELTA)}
"""The second one is BiLD's rollback."""
CHILDREN = (3, 1)


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


def p_of(rule: TypicalAcceptance) -> float:
    """Return the p-value of a sequence of each seed, by the engine's sampler, against the rule's own distribution."""
    batch, drawn = tree(), []
    children = batch.children
    for seed in range(SEEDS):
        committed: Prefix = ()
        sampler = Sampler(replace(PARAMS, seed=seed, typical=rule), (4, 2))
        while len(committed) < LENGTH:
            verified = verify(
                replace(batch, position=len(committed)),
                partial(token, sampler, committed, children),
                lambda _, at: at + 1 >= LENGTH,
            )
            committed = (*committed, *verified.tokens)
        drawn.append(committed)
    return p_value(drawn, joint(lambda prefix: defined(p_at(prefix), rule), LENGTH))


def token(sampler: Sampler, before: Prefix, children: list[list[int]], row: int, path: Sequence[int]) -> int:
    """Return what the engine's sampler takes after a row."""
    prefix = (*before, *path)
    return sampler.choose(logits_at(prefix), len(prefix), path, children[row])


@pytest.mark.parametrize("name", RULES)
def test_the_tokens_have_the_distribution_that_the_rule_defines(name: str) -> None:
    assert p_of(RULES[name]) > 1e-3
