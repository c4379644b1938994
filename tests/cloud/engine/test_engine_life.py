"""Test how sessions come and go (bounds, epochs, cancel, disconnect, failure) without leaks or disturbance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rig import (
    DIRECTIVE,
    LIMITS,
    Client,
    Rig,
    attach_of,
    client,
    nodes,
    nothing,
    perfect,
    prompt_of,
)
from tiny_targets import Reference

from cloud_verifier.engine.interface import Committed
from cloud_verifier.engine.torch_backend import executor
from cloud_verifier.engine.torch_backend.batch import PackedBatch
from cloud_verifier.engine.torch_backend.kernels.attention import AttentionPlan
from cloud_verifier.engine.torch_backend.model import TargetModel
from outrider.core.errors import (
    InternalError,
    Unavailable,
)
from outrider.core.protocol.messages import Finish
from outrider.core.step_cost import StepCost

Target = Callable[[str], TargetModel]
Plain = Callable[[str], Reference]


@pytest.fixture
def llama(target: Target) -> TargetModel:
    return target("llama")


def running(rig: Rig, reference: Plain, name: str = "s", tokens: int = 40, turns: int = 4) -> tuple[Client, list[int]]:
    """Return a session that has generated some tokens, and all tokens that it will generate."""
    prompt = prompt_of(11)
    expected = reference("llama").generate(prompt, tokens, ignore_eos=True)
    one = client(prompt, perfect(expected[:3]), max_tokens=tokens, ignore_eos=True)
    rig.attach(name, one)
    for _ in range(turns):
        rig.turn()
    assert 0 < len(one.device.received) < tokens
    return one, expected


def test_a_device_that_missed_the_last_commit_gets_the_end_again(llama: TargetModel, reference: Plain) -> None:
    prompt = prompt_of(8)
    expected = reference("llama").generate(prompt, 6, ignore_eos=True)
    rig = Rig(llama)
    one = client(prompt, perfect(expected), max_tokens=6, ignore_eos=True)
    rig.attach("s", one)
    rig.clients.clear()  # everything is lost on its way
    while rig.engine.stats().verifier.live_sessions:
        rig.clock.now += 1.0
        rig.turn()
    rig.attach("s", one)
    assert rig.slots == (0, 0)
    (event,) = rig.turn()
    assert isinstance(event, Committed)
    assert (event.commit.start, event.commit.finish) == (0, Finish.LENGTH)
    assert one.device.received == expected


class CorruptedForward:
    """Stand in for a model's forward pass and corrupt chosen steps."""

    def __init__(self, model: TargetModel, corrupt: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._forward = model.forward
        self._corrupt = corrupt
        self.on = True

    def __call__(self, *args: Any) -> torch.Tensor:
        logits = self._forward(*args)
        return self._corrupt(logits.clone()) if self.on else logits


def test_a_forward_that_raises_fails_the_sessions_in_it_and_no_later_one(
    target: Target, reference: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    def explode(_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory")

    model = target("llama")
    rig = Rig(model)
    one, expected = running(rig, reference)
    corrupted = CorruptedForward(model, explode)
    monkeypatch.setattr(model, "forward", corrupted)
    rig.turn()
    assert [type(error) for error in one.errors] == [InternalError]
    assert rig.slots == (0, 0)
    corrupted.on = False
    one.errors.clear()
    rig.attach("s", one)
    rig.run()
    assert one.device.received == expected


def test_a_device_that_has_failed_ends_the_engine_and_blames_no_session(
    llama: TargetModel, reference: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(batch: PackedBatch, plan: AttentionPlan) -> torch.Tensor:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered\nmore")

    rig = Rig(llama)
    one, _ = running(rig, reference)
    monkeypatch.setattr(llama, "forward", broken)
    rig.turn()
    assert [type(error) for error in one.errors] == [InternalError]  # the device itself works
    monkeypatch.setattr(executor, "works", lambda device: False)
    rig.attach("another", client(prompt_of(11), nothing, max_tokens=8))
    with pytest.raises(Unavailable, match=r"has failed: CUDA error: an illegal memory access was encountered$"):
        rig.run()


SLOW = {1: 1.0}
"""Seconds of a step so long that a wait of a few milliseconds pays."""


def test_a_device_that_was_waited_for_in_vain_is_not_until_nodes_of_its_are_evaluated(llama: TargetModel) -> None:
    rig = Rig(llama, cost=StepCost(SLOW))
    rig.engine.start("s", attach_of([1, 2], max_tokens=64, ignore_eos=True), LIMITS, DIRECTIVE)
    assert len(rig.engine.step()) == 1
    for _ in range(2):
        assert rig.engine.step() == []
        rig.clock.now += 0.005
        assert len(rig.engine.step()) == 1
    assert len(rig.engine.step()) == 1
    rig.engine.append("s", nodes(3, base=rig.engine.counters.committed))
    assert len(rig.engine.step()) == 1
    assert rig.engine.step() == []
