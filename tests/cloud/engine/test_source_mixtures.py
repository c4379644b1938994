"""Test by chi-square that the verifier's own sources together leave the target's joint distribution of three tokens.

The target has five tokens. The engine, its overlay and the sources are those that serve: n-grams of the session's text,
a draft on llama.cpp and heads on the target's states; and a source, or a device, that knows the noise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from chi_square import Prefix, joint, p_value
from filtered import filtered_log_probs
from rig import DIRECTIVE, Drafter, Rig, client, nothing, random_heads
from tiny_gguf import write_tiny_llama
from tiny_targets import FEW, make_tiny

from cloud_verifier.engine import session as engine_session
from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.sampling import Sampler
from cloud_verifier.engine.server_draft.base import EvaluatedRows, ProposalRequest, ServerSource, grow
from cloud_verifier.engine.server_draft.heads import HeadsSource
from cloud_verifier.engine.server_draft.llama_draft import LlamaServerDraft
from cloud_verifier.engine.server_draft.ngram import NgramSource
from cloud_verifier.engine.server_draft.overlay import Overlay
from cloud_verifier.engine.session import EngineSession, ProposedTree
from cloud_verifier.engine.stats import EngineCounters
from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine.torch_backend.numerics_check import check_numerics
from outrider.core.proposals import Proposal
from outrider.core.protocol.device import DeviceSession
from outrider.core.sampling import SamplingParams
from outrider.core.tree import ROOT
from outrider.core.verification import TreeBatch, Verified, verify
from outrider.llama import ChainContext, LlamaModel

VOCABULARY = 5
PROMPT = (0, 1, 2, 3, 0, 2, 1, 0, 3, 1, 0, 2, 3)
LENGTH = 3
"""Tokens that are compared. The first one is committed with the prompt, before a source of the verifier is asked."""
SESSIONS = 600
TOGETHER = 32
"""Sessions at a time."""
ROOM = replace(DIRECTIVE, nodes_per_step=24)
"""Room for nodes of every source, though one may be surer than another."""
SAMPLING: dict[str, Any] = {"temperature": 1.6, "top_p": 0.95}
MIXTURES = [
    ("ngram", "eagle"),
    ("ngram", "gguf", "medusa", "adversary"),
]


@cache
def logits_after(tokens: Prefix) -> np.ndarray:
    """Return the target's logits `[V]` by plain transformers."""
    with torch.inference_mode():
        return _module()(torch.tensor([tokens])).logits[0, -1].numpy()


@cache
def _module() -> Any:
    return make_tiny(FEW)


def p_after(prefix: Prefix) -> np.ndarray:
    p = np.exp(filtered_log_probs(logits_after((*PROMPT, *prefix)).astype(np.float64), SamplingParams(**SAMPLING)))
    return p / p.sum()


def misleading(sampler: Sampler, tokens: Sequence[int]) -> list[int]:
    """Return two children that tell something of the noise: the target's own token is among them only if it is low."""
    own = sampler.choose(logits_after(tuple(tokens)), len(tokens) - len(PROMPT), ())
    return [own, (own + 1) % VOCABULARY] if own < 2 else [token for token in range(VOCABULARY) if token != own][:2]


class Adversary:
    """A source that knows the target and the noise."""

    name, max_sessions, wants_hidden, pauses, read_s = "adversary", 64, False, False, 0.0

    def propose(self, requests: Sequence[ProposalRequest]) -> Mapping[str, ProposedTree]:
        return {one.session.session_id: grow(one, partial(self._children, one.session)) for one in requests}

    def observe(self, session: EngineSession, rows: EvaluatedRows) -> None:
        raise AssertionError("it has asked for nothing")

    def release(self, session_id: str) -> None:
        pass

    def _children(self, session: EngineSession, path: Sequence[int]) -> list[Proposal]:
        tokens = misleading(session.sampler, (*session.tokens, *path))
        return [Proposal(token, rank, 1.0) for rank, token in enumerate(tokens)]


def knowing_the_noise(params: SamplingParams) -> Drafter:
    """Return a device that knows the target and the noise."""
    sampler = Sampler(params, PROMPT)

    def draft(device: DeviceSession, rng: object) -> None:
        parent, path = ROOT, list[int]()
        for _ in range(2):
            for token in misleading(sampler, (*PROMPT, *device.received, *path)):
                if device.tree.child(parent, token) is None:
                    device.add(parent, token)
            first = next(iter(device.tree.children(parent)), None)
            if first is None:
                return
            parent = device.tree.children(parent)[first]
            path.append(first)

    return draft


@dataclass
class Parts:
    """Makes sources for a target that keeps its hidden states."""

    target: TargetModel
    draft: LlamaModel

    def sources(self, names: Sequence[str]) -> Iterator[ServerSource]:
        """Yield new sources, which never pause, so that the speed of this machine decides nothing."""
        for name in names:
            match name:
                case "ngram" | "adversary":
                    source: Any = {"ngram": NgramSource, "adversary": Adversary}[name]()
                    source.pauses = False
                    yield source
                case "gguf":
                    chains = ChainContext(self.draft, length=64, count=TOGETHER)
                    yield LlamaServerDraft(chains, depth=2, vocabulary=VOCABULARY, pauses=False)
                case kind:
                    yield HeadsSource(random_heads(kind), self.target, vocabulary=VOCABULARY, pauses=False)


@pytest.fixture(scope="module")
def parts(tiny_directory: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Parts]:
    target = TargetModel.load(tiny_directory(FEW))
    target.keep_states()
    check_numerics(target)
    with LlamaModel.load(write_tiny_llama(tmp_path_factory.mktemp("gguf") / "tiny.gguf")) as draft:
        yield Parts(target, draft)


def sequences(parts: Parts, names: Sequence[str], *, device: bool, count: int) -> tuple[list[Prefix], EngineCounters]:
    """Return the first tokens of `count` sessions with seeds of their own, and what the engine has counted."""
    sources, drawn = list(parts.sources(names)), list[Prefix]()
    rig = Rig(
        parts.target,
        EngineConfig(max_sessions=TOGETHER, prefix_cache=False),
        overlay=Overlay(sources, clock=lambda: 0.0),
    )
    for seed in range(count):
        params = SamplingParams(seed=seed, **SAMPLING)
        draft = knowing_the_noise(params) if device else nothing
        joining = client(PROMPT, draft, max_tokens=LENGTH + 1, ignore_eos=True, sampling=params)
        joining.directive = ROOM
        rig.attach(f"s{seed}", joining)
        if len(rig.clients) == TOGETHER or seed + 1 == count:
            rig.run()
            drawn += [tuple(one.device.received[:LENGTH]) for one in rig.clients.values()]
            rig.clients.clear()
    return drawn, rig.engine.counters


def trusting(
    batch: TreeBatch, target_token: Callable[[int, Sequence[int]], int], ends: Callable[[int, int], bool]
) -> Verified:
    """Take, wrongly, the last node of the sources below a row, whatever the target chooses there."""
    own: dict[int, int] = {}
    for node, parent, token in zip(batch.ids, batch.parents, batch.tokens, strict=True):
        if node < ROOT:
            own[parent] = token
    return verify(batch, lambda row, path: own[row] if row in own else target_token(row, path), ends)


@pytest.mark.parametrize(("names", "device"), list(zip(MIXTURES, (False, True), strict=True)))
def test_the_tokens_have_the_targets_joint_distribution_with_every_mixture_of_sources(
    names: Sequence[str], device: bool, parts: Parts
) -> None:
    drawn, counters = sequences(parts, names, device=device, count=SESSIONS)
    # The test can tell something only if nodes of each source were accepted.
    assert len(counters.sources) == len(names)
    assert all(accepted > SESSIONS / 4 for _, accepted in counters.sources.values()), counters.sources
    assert (counters.accepted > SESSIONS / 4) is device
    assert p_value(drawn, joint(p_after, LENGTH)) > 1e-3


def test_a_verification_that_trusts_a_source_is_rejected(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_session, "verify", trusting)
    drawn, _ = sequences(parts, MIXTURES[0], device=True, count=SESSIONS // 2)
    assert p_value(drawn, joint(p_after, LENGTH)) < 1e-6
