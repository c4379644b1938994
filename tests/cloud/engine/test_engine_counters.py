"""Test that the engine's counters for operators agree with what its sessions received."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rig import Rig, client, nothing, perfect, prompt_of
from tiny_targets import Reference

from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine_process.loop import counters_to_proto

Plain = Callable[[str], Reference]


@pytest.fixture
def llama(target: Callable[[str], TargetModel]) -> TargetModel:
    return target("llama")


def test_a_perfect_drafts_nodes_are_all_accepted_at_their_positions(llama: TargetModel, reference: Plain) -> None:
    rig, prompt = Rig(llama), prompt_of(9)
    expected = reference("llama").generate(prompt, 24, ignore_eos=True)
    rig.attach("s", client(prompt, perfect(expected), max_tokens=24, ignore_eos=True))
    rig.run()
    counters = rig.engine.counters
    assert counters.committed == 24
    assert 0 < counters.accepted <= counters.evaluated
    assert sum(counters.accepted_by_position) == counters.accepted
    assert counters.accepted_by_position[0] == counters.drafts
    assert sorted(counters.accepted_by_position, reverse=True) == counters.accepted_by_position


def test_the_message_to_the_front_has_all_counters(llama: TargetModel) -> None:
    rig = Rig(llama)
    rig.attach("s", client(prompt_of(7), nothing, max_tokens=6, ignore_eos=True))
    rig.run()
    stats, counters = rig.engine.stats(), rig.engine.counters
    message = counters_to_proto(counters, stats)
    assert (message.committed, message.steps, message.prefilled) == (6, counters.steps, counters.prefilled)
    assert list(message.step_s.counts) == counters.step_s.counts
    assert message.step_s.sum == counters.step_s.sum
    assert dict(message.part_s) == counters.part_s
    assert dict(message.sessions) == dict(stats.states)
