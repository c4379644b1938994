"""Test that coupled tree sampling has the target's joint distribution: a chi-square test over whole sequences.

A vocabulary of five, three positions: 125 sequences, each with a known probability. The device proposes, per node, the
children that maximise log q + g; the verifier verifies with its own argmax of log p + g, and steps again from where it
stopped until three tokens are committed.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import chi_square
import numpy as np
import pytest
from filtered import filtered_log_probs
from single_walk import verify

from outrider.core.coupling import gumbel, position_key, session_key
from outrider.core.processors import log_softmax
from outrider.core.sampling import SamplingParams
from outrider.core.verification import TreeBatch

VOCABULARY = 5
LENGTH = 3
SEEDS = 8_000 if os.environ.get("OUTRIDER_NIGHTLY") else 1_000
CHILDREN = 2
PARAMS = SamplingParams(temperature=0.8, top_p=0.93)

Prefix = tuple[int, ...]
Table = dict[Prefix, np.ndarray]
"""prefix -> log p of the next token `[V]`"""


def prefixes() -> list[Prefix]:
    return [prefix for size in range(LENGTH) for prefix in itertools.product(range(VOCABULARY), repeat=size)]


def table(logits: Callable[[Prefix], np.ndarray]) -> Table:
    return {prefix: log_softmax(filtered_log_probs(logits(prefix), PARAMS)) for prefix in prefixes()}


def raw(name: int, prefix: Prefix) -> np.ndarray:
    return np.random.default_rng([name, len(prefix), *prefix]).normal(0.0, 1.2, VOCABULARY)


TARGET = table(lambda prefix: raw(1, prefix))
DRAFTS = {
    "the target itself": TARGET,
    "a good draft": table(lambda prefix: raw(1, prefix) + 0.5 * raw(2, prefix)),
    "an unrelated draft": table(lambda prefix: raw(3, prefix)),
    "a draft that knows nothing": table(lambda prefix: np.zeros(VOCABULARY)),
    "a draft that is always wrong": table(lambda prefix: -4.0 * raw(1, prefix)),
    "a draft that is sure of one token": table(lambda prefix: 20.0 * np.eye(VOCABULARY)[sum(prefix) % VOCABULARY]),
}


@cache
def noise() -> np.ndarray:
    """Return g `[seed, position, V]` as a session makes it."""
    ids = np.arange(VOCABULARY, dtype=np.int64)
    keys = [session_key(seed, (4, 2)) for seed in range(SEEDS)]
    return np.array([[gumbel(position_key(key, t), ids) for t in range(LENGTH)] for key in keys])


def ranked(log_probs: Table, g: np.ndarray) -> dict[Prefix, list[list[int]]]:
    """Return the tokens per prefix and seed by decreasing log p + g; those without probability are last."""
    return {prefix: np.argsort(-(log_p + g[:, len(prefix)]), axis=1).tolist() for prefix, log_p in log_probs.items()}


@dataclass
class Session:
    """Hold the order of the tokens for target and draft, per prefix, of one seed's session."""

    seed: int
    target: dict[Prefix, list[list[int]]]
    draft: dict[Prefix, list[list[int]]]

    def token(self, prefix: Prefix) -> int:
        return self.target[prefix][self.seed][0]

    def proposals(self, prefix: Prefix) -> list[int]:
        return self.draft[prefix][self.seed][:CHILDREN]


def tree(session: Session, committed: Prefix) -> TreeBatch:
    """Return two children per node, as deep as the sequence goes."""
    parents: list[int] = []
    tokens: list[int] = []
    depths: list[int] = []
    open_rows = [(0, committed)]
    for row, prefix in open_rows:
        if len(prefix) == LENGTH:
            continue
        for token in session.proposals(prefix):
            parents.append(row)
            tokens.append(token)
            depths.append(len(prefix) + 1 - len(committed))
            open_rows.append((len(tokens), (*prefix, token)))
    return TreeBatch(tuple(range(1, len(tokens) + 1)), tuple(parents), tuple(tokens), tuple(depths), len(committed))


def generate(session: Session) -> Prefix:
    committed: Prefix = ()
    while len(committed) < LENGTH:
        batch, start = tree(session, committed), committed

        def target_token(row: int, path: list[int], start: Prefix = start) -> int:
            return session.token((*start, *path))

        verified = verify(batch, target_token, lambda token, position: position + 1 >= LENGTH)
        committed = (*committed, *verified.tokens)
    return committed


def sequences(draft: Table, g: np.ndarray) -> list[Prefix]:
    target, draft_order = ranked(TARGET, g), ranked(draft, g)
    return [generate(Session(seed, target, draft_order)) for seed in range(len(g))]


JOINT = chi_square.joint(lambda prefix: np.exp(TARGET[prefix]), LENGTH)


def p_value(drawn: list[Prefix]) -> float:
    return chi_square.p_value(drawn, JOINT)


@pytest.mark.parametrize("name", DRAFTS)
def test_the_committed_tokens_have_the_targets_joint_distribution(name: str) -> None:
    assert p_value(sequences(DRAFTS[name], noise())) > 1e-3


def test_every_draft_leads_to_the_very_same_tokens() -> None:
    g = noise()[:1_000]
    plain = ranked(TARGET, g)
    alone = []
    for seed in range(len(g)):
        whole: Prefix = ()
        while len(whole) < LENGTH:
            whole = (*whole, plain[whole][seed][0])
        alone.append(whole)
    for name, draft in DRAFTS.items():
        assert sequences(draft, g) == alone, name
