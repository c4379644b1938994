"""Test that a device that confirms nothing stops its own session (rule 16), and does not keep others out for good."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rig import LIMITS, Rig, attach_of, client, nothing, prompt_of
from session_messages import directive
from tiny_targets import Reference

from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.interface import Committed, Failed
from cloud_verifier.engine.torch_backend.model import TargetModel
from outrider.core.errors import Overloaded, Unavailable

Target = Callable[[str], TargetModel]
Plain = Callable[[str], Reference]
STREAMING = directive(window_nodes=0, nodes_per_step=0, draft_wait_ms=0)
PROMPT = prompt_of(9)


def stalled(rig: Rig) -> list[int]:
    """Run `still` until it stalls; return its tokens so far."""
    rig.engine.start("still", attach_of(PROMPT, max_tokens=80, ignore_eos=True), LIMITS, STREAMING)
    tokens: list[int] = []
    while len(tokens) < LIMITS.run_ahead:
        tokens += [t for event in rig.engine.step() if isinstance(event, Committed) for t in event.commit.token]
    assert rig.engine.next_deadline() is None
    return tokens


def ends(rig: Rig) -> list[Failed]:
    return [event for event in rig.engine.step() if isinstance(event, Failed)]


def test_it_goes_after_the_stated_time_and_comes_back_for_the_rest(target: Target, reference: Plain) -> None:
    rig = Rig(target("llama"), EngineConfig(kv_slots=1024))
    tokens = stalled(rig)
    rig.clock.now += 59.0
    assert ends(rig) == []
    rig.clock.now += 2.0
    (end,) = ends(rig)
    assert isinstance(end.error, Unavailable)
    assert rig.slots == (0, 0)

    before = rig.engine.counters.prefilled
    attach = attach_of(PROMPT, epoch=2, tokens=tuple(tokens[:5]), max_tokens=80, ignore_eos=True)
    rig.engine.start("still", attach, LIMITS, STREAMING)
    while rig.engine.next_deadline() is not None and len(tokens) < 5 + LIMITS.run_ahead:
        for event in rig.engine.step():
            assert isinstance(event, Committed)
            tokens[event.commit.start :] = event.commit.token
    assert tokens == reference("llama").generate(PROMPT, 80, ignore_eos=True)[: len(tokens)]
    assert len(tokens) == 5 + LIMITS.run_ahead
    assert rig.engine.counters.prefilled == before  # what it had computed was in the prefix cache


def test_it_makes_room_for_others_within_seconds(target: Target) -> None:
    rig = Rig(target("llama"), EngineConfig(kv_slots=160))
    stalled(rig)
    joining = client(prompt_of(20), nothing, max_tokens=20, ignore_eos=True)
    with pytest.raises(Overloaded):
        rig.attach("new", joining)
    rig.clock.now += 6.0
    rig.attach("new", joining)
    assert [event.session_id for event in rig.turn() if isinstance(event, Failed)] == ["still"]
    rig.run()
    assert len(joining.device.received) == 20


def test_one_that_the_target_has_dropped_goes_early_only_if_another_waits_for_room(target: Target) -> None:
    rig = Rig(target("llama"), EngineConfig(kv_slots=1024))
    stalled(rig)
    rig.engine._live["still"].blocked = True
    rig.clock.now += 6.0
    assert ends(rig) == []
    rig.engine.start("able", attach_of(prompt_of(20), max_tokens=20, ignore_eos=True), LIMITS, STREAMING)
    rig.engine._live["able"].blocked = True
    rig.clock.now += 2.0
    assert [end.session_id for end in ends(rig)] == ["still"]
