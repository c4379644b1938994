"""Test the engine with heads on its target: no token depends on them, whatever they propose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from filtered import filtered_log_probs
from rig import Rig, client, nothing, prompt_of, random_heads, random_tree
from scipy import stats
from tiny_targets import VOCAB, Reference, make_tiny

from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.server_draft.base import ProposalRequest, ProposedTree
from cloud_verifier.engine.server_draft.heads import HeadsSource
from cloud_verifier.engine.server_draft.overlay import Overlay
from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine.torch_backend.numerics_check import check_numerics
from outrider.core.sampling import SamplingParams
from outrider.core.tree import ROOT

SAMPLING = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8, seed=3),
    "filtered": SamplingParams(temperature=1.0, top_k=5, repetition_penalty=1.2, seed=4),
}


class Watched(HeadsSource):
    """Keep the first child of each root that was proposed, and the position."""

    firsts: list[tuple[str, int, int]]

    def propose(self, requests: Sequence[ProposalRequest]) -> Mapping[str, ProposedTree]:
        found = super().propose(requests)
        for session_id, tree in found.items():
            if tree.children(ROOT):
                self.firsts.append((session_id, tree.position, next(iter(tree.children(ROOT)))))
        return found


@pytest.fixture(scope="module")
def keeping(tiny_directory: Callable[[str], Path]) -> TargetModel:
    """Return a target that keeps its hidden states."""
    model = TargetModel.load(tiny_directory("qwen3"))
    model.keep_states()
    check_numerics(model)
    return model


def heads_on(model: TargetModel, kind: str) -> Watched:
    source = Watched(random_heads(kind), model, vocabulary=VOCAB, pauses=False)
    source.firsts = []
    return source


def rig_on(model: TargetModel, source: HeadsSource, **config: Any) -> Rig:
    settings = EngineConfig(**{"kv_slots": 4096, "max_sessions": 32} | config)
    return Rig(model, settings, overlay=Overlay([source], clock=lambda: 0.0))


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_the_tokens_with_heads_are_those_without(kind: str, sampling: str, keeping: TargetModel) -> None:
    source, reference = heads_on(keeping, kind), Reference(make_tiny("qwen3"))
    rig = rig_on(keeping, source)
    for i in range(5):
        rig.attach(
            f"s{i}",
            client(
                prompt_of(8 + 5 * i),
                random_tree if i % 2 else nothing,
                max_tokens=30,
                ignore_eos=True,
                sampling=SAMPLING[sampling],
            ),
        )
    rig.run()
    assert rig.engine.counters.server_evaluated > 0
    for i in range(5):
        expected = reference.generate(prompt_of(8 + 5 * i), 30, SAMPLING[sampling], ignore_eos=True)
        assert rig.clients[f"s{i}"].device.received == expected
    assert not source._memories  # all released


DRAWN = 480
PROMPT = prompt_of(9)
PARAMS = SamplingParams(temperature=1.0, top_k=4)


def expected_second(module: Any) -> np.ndarray:
    """Return the target's distribution of the second token after PROMPT, `[V]`."""

    @torch.inference_mode()
    def p(tokens: list[int]) -> np.ndarray:
        logits = module(torch.tensor([tokens])).logits[0, -1].double().numpy()
        return np.exp(filtered_log_probs(logits, PARAMS))

    first = p(PROMPT)
    return np.sum([first[token] * p([*PROMPT, int(token)]) for token in np.flatnonzero(first > 0)], axis=0)


def p_value(tokens: Sequence[int], p: np.ndarray) -> float:
    """Return the p-value of chi-square against p, with tokens that are expected less than five times as one."""
    counts, wanted = np.bincount(tokens, minlength=VOCAB), p * len(tokens)
    often = wanted >= 5
    found = [*counts[often], counts[~often].sum()]
    expected = [*wanted[often], wanted[~often].sum()]
    if expected[-1] < 1e-9:
        if found[-1]:
            return 0.0
        found, expected = found[:-1], expected[:-1]
    return float(stats.chisquare(found, expected, sum_check=False).pvalue)


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_tokens_have_the_targets_distribution_whatever_heads_propose(kind: str, keeping: TargetModel) -> None:
    source = heads_on(keeping, kind)
    seconds: dict[str, int] = {}
    for begin in range(0, DRAWN, 24):
        rig = rig_on(keeping, source)
        for seed in range(begin, begin + 24):
            params = SamplingParams(temperature=1.0, top_k=4, seed=seed)
            rig.attach(f"s{seed}", client(PROMPT, nothing, max_tokens=4, ignore_eos=True, sampling=params))
        rig.run()
        seconds |= {name: one.device.received[1] for name, one in rig.clients.items()}
    proposed = {name: token for name, position, token in source.firsts if position == 1}
    assert len(proposed) > DRAWN / 2
    p = expected_second(make_tiny("qwen3"))
    assert p_value(list(seconds.values()), p) > 1e-3
    # The test can fail: it rejects a rule that takes what the heads propose.
    assert p_value([proposed.get(name, token) for name, token in seconds.items()], p) < 1e-6
