"""Test heads on the target: their states, their files, and that they draft as they were trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rig import prompt_of
from tiny_targets import SHAPE, VOCAB, make_tiny

from cloud_verifier.distill.training.heads_student import UNROLLED, HeadsStudent
from cloud_verifier.engine.server_draft.base import ProposalRequest
from cloud_verifier.engine.server_draft.head_models import (
    Heads,
    HeadsFile,
    HeadsShape,
    load_heads,
    new_heads,
    save_heads,
)
from cloud_verifier.engine.server_draft.heads import HeadsSource
from cloud_verifier.engine.torch_backend.batch import PackedBatch, Segment
from cloud_verifier.engine.torch_backend.kv_pool import KVPool
from cloud_verifier.engine.torch_backend.model import TargetModel
from outrider.core.errors import ModelRefused
from outrider.core.proposals import Proposal
from outrider.core.sampling import SamplingParams

HIDDEN = SHAPE["hidden_size"]
TARGET = "sha256:" + "a" * 64


def random_heads(kind: str, depth: int = 3, window: int = 64) -> Heads:
    """Return heads whose weights are all random, so that nothing is the identity."""
    heads = new_heads(HeadsShape.model_validate({"kind": kind, "hidden": HIDDEN, "depth": depth, "window": window}))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return heads.eval()


def forward(model: TargetModel, tokens: list[int]) -> torch.Tensor:
    """Return the logits of the last four of twelve tokens, of which three are a chain of nodes."""
    pool = KVPool(model.layers, 32, dtype=model.torch_dtype, device=model.device)
    segment = Segment(
        tokens=np.asarray(tokens),
        chain=9,
        parents=np.asarray([8, 9, 10]),
        positions=np.arange(12),
        prefix=np.empty(0, dtype=np.int32),
        slots=pool.allocate(12),
        wants_logits=True,
    )
    batch = PackedBatch.pack([segment])
    return model.forward(batch, model.attention.plan(batch.segments, pool))


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "gpt_neox", "gpt2"])
def test_a_step_returns_the_hidden_states_that_transformers_returns(
    kind: str, tiny_directory: Callable[[str], Path]
) -> None:
    model = TargetModel.load(tiny_directory(kind))
    model.keep_states()
    tokens = prompt_of(12)
    logits = forward(model, tokens)
    expected = make_tiny(kind)(torch.tensor([tokens]), output_hidden_states=True).hidden_states[-1][0, 8:]
    assert model.states is not None
    assert model.states.shape == (4, HIDDEN)
    assert torch.allclose(model.states, expected, atol=2e-4)
    if kind != "gemma2":  # which softcaps its logits
        assert torch.allclose(model.output(model.states)[:, :VOCAB], logits, atol=2e-3)


# Files


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_heads_are_the_same_after_they_were_saved_and_loaded(kind: str, tmp_path: Path) -> None:
    heads = random_heads(kind)
    save_heads(tmp_path / "heads.safetensors", heads, TARGET)
    loaded = load_heads(tmp_path / "heads.safetensors", TARGET, HIDDEN)
    assert HeadsFile.read(tmp_path / "heads.safetensors").shape == heads.shape
    for name, value in heads.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value.bfloat16().float())


def test_heads_of_another_target_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "heads.safetensors"
    save_heads(path, random_heads("eagle"), TARGET)
    with pytest.raises(ModelRefused, match=r"has heads of target sha256:aaaa.*this one is sha256:bbbb"):
        load_heads(path, "sha256:" + "b" * 64)
    with pytest.raises(ModelRefused, match="for states of 48 values, the target's have 64"):
        load_heads(path, TARGET, 64)


# What is drafted is what was trained


class TinyLayers:
    """Give the first and the last layer of a module of transformers."""

    def __init__(self, module: Any) -> None:
        self.embed, self.output = module.get_input_embeddings(), module.get_output_embeddings()


class Followed(HeadsSource):
    """Propose the tokens of a text, and keep the logits that the heads gave for them."""

    text: Sequence[int] = ()
    seen: list[torch.Tensor]

    def _children(self, session: Any, logits: torch.Tensor, path: Sequence[int]) -> list[Proposal]:
        self.seen.append(logits)
        return [Proposal(self.text[len(session.tokens) + len(path)], 0, 1.0)]


def session_of(tokens: list[int], prompt: int) -> Any:
    protocol = SimpleNamespace(position=len(tokens) - prompt, ends=lambda token, position: False)
    sampler = SimpleNamespace(constraint=None, params=SamplingParams())
    return SimpleNamespace(session_id="a", tokens=tokens, left=100, protocol=protocol, sampler=sampler)


def asked(session: Any, nodes: int = 16, floor: float = 0.0) -> ProposalRequest:
    acceptance: Any = SimpleNamespace(estimate=lambda kind, order: 0.9)
    return ProposalRequest(session, nodes, floor, acceptance)


@pytest.mark.parametrize("window", [64, 8])
@pytest.mark.parametrize("kind", ["medusa", "eagle"])
@torch.no_grad()
def test_heads_draft_what_they_are_trained_to_predict(kind: str, window: int) -> None:
    module, heads = make_tiny("qwen3"), random_heads(kind, UNROLLED, window)
    text, prompt = prompt_of(30), 6
    states = module(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0]
    labels = torch.full((1, 30), -1)
    labels[0, prompt - 1 :] = 1
    student, ids = HeadsStudent(module, heads, TARGET), torch.tensor([text])
    rest = slice(prompt - 1, None)
    trained = student.predictions(states[None, rest], ids[:, rest], labels[:, rest], UNROLLED)
    source = Followed(heads, TinyLayers(module), vocabulary=VOCAB)
    source.text = text
    known = prompt
    for accepted in (0, 2, 0, 1, 3, 0, 0, 2):
        # The last known token's row and those of the accepted nodes give the tokens after them.
        path = states[known - 1 : known + accepted]
        known += accepted + 1
        session = session_of(text[:known], prompt)
        source.observe(session, path)
        source.seen = []
        source.propose([asked(session)])
        assert len(source.seen) == UNROLLED
        for number, logits in enumerate(source.seen):
            # The session knows `known` tokens: the prediction of token known + number comes from column known - 2.
            predicted, offset, behind = trained[number]
            column = known + number - 1 - offset - (prompt - 1)
            assert column - behind == known - 2 - (prompt - 1)
            assert torch.allclose(logits, module.lm_head(predicted[0, column]), atol=1e-4)
