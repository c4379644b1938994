"""Test that the engine's counters for operators agree with what its sessions received."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from rig import LIMITS, Rig, attach_of, client, nodes, nothing, perfect, prompt_of
from tiny_targets import Reference

from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.stats import POSITIONS, STATES, EngineCounters
from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine_process.loop import counters_to_proto
from outrider.core.protocol.messages import Directive

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


def test_every_token_is_the_first_or_follows_another(llama: TargetModel) -> None:
    rig = Rig(llama)
    for seed in range(3):
        rig.attach(f"s{seed}", client(prompt_of(7, seed), nothing, max_tokens=12, ignore_eos=True))
    rig.run()
    counters = rig.engine.counters
    assert counters.first_token_s.total == 3
    assert counters.first_token_s.total + counters.token_s.total == counters.committed == 36
    assert counters.queue_s.total == 3
    assert counters.drafts == 0


def test_a_resumed_sessions_first_commit_is_no_first_token(llama: TargetModel, reference: Plain) -> None:
    rig, prompt = Rig(llama), prompt_of(9)
    expected = reference("llama").generate(prompt, 12, ignore_eos=True)
    before = attach_of(prompt, max_tokens=12, tokens=tuple(expected[:5]), ignore_eos=True)
    rig.engine.start("s", before, LIMITS, Directive())
    while rig.engine.stats().verifier.live_sessions:
        rig.engine.step()
    assert rig.engine.counters.first_token_s.total == 0
    assert rig.engine.counters.token_s.total == 7


def test_parts_and_rows_are_of_every_step_prompts_too(llama: TargetModel) -> None:
    rig = Rig(llama, EngineConfig(kv_slots=1024, max_sessions=16, token_budget=16))
    rig.attach("s", client(prompt_of(40), nothing, max_tokens=4, ignore_eos=True))
    rig.run()
    counters = rig.engine.counters
    assert counters.step_s.total == counters.rows.total == counters.steps
    assert counters.rows.sum == 40 + 3  # the prompt, and each token but the last
    inside = sum(seconds for part, seconds in counters.part_s.items() if part != "between")
    assert counters.step_s.sum == pytest.approx(inside)


def test_sessions_are_counted_by_what_they_wait_for(llama: TargetModel) -> None:
    rig = Rig(llama, EngineConfig(kv_slots=1024, max_sessions=16, token_budget=16))
    rig.engine.start("new", attach_of(prompt_of(40)), LIMITS, Directive())
    assert rig.engine.stats().states == {**dict.fromkeys(STATES, 0), "queued": 1}
    rig.engine.step()
    assert rig.engine.stats().states["prefill"] == 1
    while not rig.engine.counters.committed:
        rig.engine.step()
    assert rig.engine.stats().states["decode"] == 1
    tight = replace(LIMITS, run_ahead=1)
    rig.engine.start("stalled", attach_of(prompt_of(5), max_tokens=8), tight, Directive())
    for _ in range(4):
        rig.engine.step()
    assert rig.engine.stats().states["stalled"] == 1


def test_nodes_that_came_too_late_are_still_counted_when_their_session_has_ended(llama: TargetModel) -> None:
    rig = Rig(llama)
    rig.engine.start("s", attach_of(prompt_of(5), max_tokens=12, ignore_eos=True), LIMITS, Directive(draft_wait_ms=0))
    for _ in range(3):
        rig.engine.step()
    said = rig.engine.counters.committed
    assert said >= 2
    rig.engine.append("s", nodes(1, 2, 3, base=0))
    during = rig.engine.stats().dead
    assert during >= 2
    rig.engine.stop("s")
    assert rig.engine.stats().dead == during
    rig.engine.start("t", attach_of(prompt_of(6)), LIMITS, Directive())
    assert rig.engine.stats().dead == during


def test_what_lies_beyond_the_last_position_is_in_the_sum_alone() -> None:
    counters = EngineCounters(0.0)
    counters.count_nodes(POSITIONS + 9, POSITIONS + 9)
    counters.count_nodes(1, 1)
    assert counters.accepted_by_position == [2] + [1] * (POSITIONS - 1)


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
