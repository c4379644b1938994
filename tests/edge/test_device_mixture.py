"""Test by chi-square that drafts and n-grams of a device together leave the target's joint distribution of its tokens.

The target is a table over five tokens; two random drafts on llama.cpp and n-grams of the text propose for it, and one
source that knows table and noise. Verification follows the tree that the drafter has sent.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial

import numpy as np
import pytest
from chi_square import Prefix, joint, p_value
from filtered import filtered_log_probs
from tiny_gguf import write_tiny_llama

from edge_agent.drafting.calibrated_source import CalibratedSource
from edge_agent.drafting.drafter import Drafter
from edge_agent.drafting.growth import DecodeLatency, SpeculationPlan
from edge_agent.drafting.sources.base import DraftTask, NodeContext, Proposal
from edge_agent.drafting.sources.llama import LlamaSource
from edge_agent.drafting.sources.ngram import NgramSource
from outrider.core.acceptance.calibrator import Calibrator
from outrider.core.coupling import position_key, session_key
from outrider.core.sampling import SamplingParams
from outrider.core.target_token import sampled_token
from outrider.core.tree import TokenTree
from outrider.core.verification import TreeBatch, tree_batch_of, verify
from outrider.llama import LlamaModel, TreeContext

VOCABULARY = 5
PROMPT = (0, 1, 2, 3, 0, 2, 1, 0, 3, 1, 0, 2, 3)
LENGTH = 3
SEEDS = 800
PLAN = SpeculationPlan(nodes=6, depth=2, nodes_per_step=12, min_acceptance=0.05, draft_wait_s=0.008, step_s=0.05)
LATENCY = DecodeLatency(((1, 1e-3), (4, 2e-3)))
Mixture = tuple[str, ...]
MIXTURES: list[Mixture] = [("draft", "second draft", "ngram", "adversary")]


def params_of(seed: int) -> SamplingParams:
    return SamplingParams(temperature=0.9, top_p=0.95, seed=seed)


@cache
def logits_after(prefix: Prefix) -> np.ndarray:
    return np.random.default_rng([18, len(prefix), *prefix]).normal(0.0, 1.2, VOCABULARY)


@cache
def p_after(prefix: Prefix) -> np.ndarray:
    p = np.exp(filtered_log_probs(logits_after(prefix), params_of(0)))
    return p / p.sum()


def own_token(seed: int, prefix: Prefix) -> int:
    """Return the token that the target takes."""
    at = position_key(session_key(seed, PROMPT), len(prefix))
    return sampled_token(logits_after(prefix), params_of(seed), at)


class Adversary:
    """A source that knows the target and the noise: it proposes the target's token only if that is low."""

    def begin(self, task: DraftTask) -> None:
        self._seed, self._received = task.sampling.seed, task.received

    def advance(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        self._received = (*self._received, *tokens)

    def expand(self, nodes: Sequence[NodeContext]) -> list[list[Proposal]]:
        return [self._propose((*self._received, *node.path)) for node in nodes]

    def knows(self, token: int) -> bool:
        return True

    def _propose(self, prefix: Prefix) -> list[Proposal]:
        own = own_token(self._seed, prefix)
        tokens = [own] if own < 2 else [token for token in range(VOCABULARY) if token != own][:2]
        return [Proposal(token, rank, 1.0) for rank, token in enumerate(tokens)]


@pytest.fixture(scope="module")
def drafter_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Mixture], Drafter]]:
    """Yield a function: names of sources -> a new drafter with them."""
    folder = tmp_path_factory.mktemp("gguf")
    with contextlib.ExitStack() as owned:
        models = {
            name: owned.enter_context(LlamaModel.load(write_tiny_llama(folder / f"{seed}.gguf", seed=seed)))
            for seed, name in enumerate(("draft", "second draft"))
        }

        def calibrated(name: str) -> CalibratedSource:
            if name not in models:
                return CalibratedSource(
                    {"ngram": NgramSource, "adversary": Adversary}[name](), Calibrator(), Calibrator()
                )
            context = owned.enter_context(TreeContext(models[name], n_ctx=128, max_sequences=16, batch=32))
            return CalibratedSource(
                LlamaSource(context, shared_vocabulary=VOCABULARY), Calibrator(), Calibrator(), LATENCY
            )

        yield lambda names: Drafter([calibrated(name) for name in names], clock=lambda: 0.0)


Rule = Callable[[int, Prefix, Sequence[int]], int]
"""(seed, prefix, tokens of the children that were sent) -> the token that verification takes"""


def coupled(seed: int, prefix: Prefix, children: Sequence[int]) -> int:
    return own_token(seed, prefix)


def trusting(seed: int, prefix: Prefix, children: Sequence[int]) -> int:
    """Take, wrongly, the first child that was sent, whatever the target chooses."""
    return next(iter(children), own_token(seed, prefix))


def drawn_again(seed: int, prefix: Prefix, children: Sequence[int]) -> int:
    """Draw, wrongly, another token of the target if no child carries its own."""
    own = own_token(seed, prefix)
    return own if own in children else int(np.random.default_rng([seed, *prefix]).choice(VOCABULARY, p=p_after(prefix)))


def taken(
    rule: Rule, seed: int, before: Prefix, children: Sequence[Sequence[int]], row: int, path: Sequence[int]
) -> int:
    return rule(seed, (*before, *path), children[row])


def sequences(drafter: Drafter, rule: Rule, count: int) -> tuple[list[Prefix], int]:
    """Return what sessions with seeds of their own commit, and the number of nodes that were accepted."""
    drawn, accepted = list[Prefix](), 0
    for seed in range(count):
        committed, tree = tuple[int, ...](), TokenTree()
        drafter.begin(DraftTask(PROMPT, sampling=params_of(seed), max_tokens=LENGTH), PLAN)
        while len(committed) < LENGTH:
            batch = sent(drafter, tree)
            verified = verify(
                batch,
                partial(taken, rule, seed, committed, batch.children),
                lambda token, position: position + 1 >= LENGTH,
            )
            committed, accepted = (*committed, *verified.tokens), accepted + len(verified.rows)
            drafter.advance(verified.tokens)
            for token in verified.tokens:
                tree.advance(token)
        drawn.append(committed)
    return drawn, accepted


def sent(drafter: Drafter, tree: TokenTree) -> TreeBatch:
    """Let the drafter draft all it wants, and return the verifier's batch of the tree that it has sent so far."""
    moved = True
    while moved:
        moved = drafter.step()
        if (update := drafter.harvest(moved=moved)) is not None:
            assert update.base == tree.position
            for node in update.nodes:
                tree.add(node.id, node.parent, node.token)
    return tree_batch_of(tree, {node.id for node in tree})


@pytest.mark.parametrize("names", MIXTURES, ids=", ".join)
def test_the_tokens_have_the_targets_joint_distribution_with_every_mixture_of_a_devices_sources(
    names: Mixture, drafter_of: Callable[[Mixture], Drafter]
) -> None:
    drawn, accepted = sequences(drafter_of(names), coupled, SEEDS)
    assert accepted > SEEDS
    assert p_value(drawn, joint(p_after, LENGTH)) > 1e-3


@pytest.mark.parametrize("rule", [trusting, drawn_again], ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("names", MIXTURES, ids=", ".join)
def test_a_rule_that_asks_what_a_mixture_has_proposed_is_rejected(
    names: Mixture, rule: Rule, drafter_of: Callable[[Mixture], Drafter]
) -> None:
    assert p_value(sequences(drafter_of(names), rule, SEEDS)[0], joint(p_after, LENGTH)) < 1e-6
