"""Test the engine with heads on its target: no token depends on them, whatever they propose."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from rig import Rig, client, nothing, prompt_of, random_heads, random_tree
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
