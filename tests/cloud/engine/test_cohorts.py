"""Test steps in two cohorts: when they pay, and that they change no token and lose nothing of what comes meanwhile."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from late_target import LateExecutor, OverlappingExecutor, always_in_cohorts
from rig import DIRECTIVE, LIMITS, Rig, adversary, attach_of, client, nodes, nothing, perfect, prompt_of, random_tree
from tiny_targets import Reference

from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.interface import Committed, Event, Failed
from cloud_verifier.engine.server_draft.ngram import ServerNgramSource
from cloud_verifier.engine.server_draft.overlay import Overlay
from cloud_verifier.engine.stats import new_counters
from cloud_verifier.engine.step_profiler import StepProfiler
from cloud_verifier.engine.torch_backend.batch import PackedBatch
from cloud_verifier.engine.torch_backend.kernels.attention import AttentionPlan
from cloud_verifier.engine.torch_backend.model import TargetModel
from outrider.core.errors import InternalError
from outrider.core.protocol.messages import Cancel, Directive, Finish
from outrider.core.sampling import SamplingParams
from outrider.core.step_cost import StepCost
from outrider.wire.v1 import engine_pb2 as pb

Target = Callable[[str], TargetModel]
Plain = Callable[[str], Reference]
SAMPLINGS = (SamplingParams(), SamplingParams(temperature=0.8, seed=5), SamplingParams(repetition_penalty=1.3))


@pytest.fixture(params=[LateExecutor, OverlappingExecutor])
def rig(request: pytest.FixtureRequest, target: Target, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Return a rig in which sessions always step in two cohorts, if there are two of them."""
    always_in_cohorts(monkeypatch)
    config = EngineConfig(kv_slots=4096, max_sessions=16)
    return Rig(target("llama"), config, overlay=Overlay([ServerNgramSource()]), executor=request.param)


def two_sessions(rig: Rig) -> None:
    """Begin two sessions, have their prompts read, and leave the first one's next step under way."""
    for name in ("a", "b"):
        rig.engine.start(name, attach_of(prompt_of(5), ignore_eos=True), LIMITS, DIRECTIVE)
    assert len(rig.engine.step()) == 2
    rig.clock.now += 0.1  # no device is waited for any more
    while rig.engine._launched is None:
        assert rig.engine.step() == []


def next_events(rig: Rig) -> list[Event]:
    """Step until there are events: a step may only draft for the next one."""
    while not (events := rig.engine.step()):
        rig.clock.now += 0.1
    return events


@pytest.mark.parametrize(
    ("forward_s", "host_s", "pays"),
    [
        ((15e-3, 15e-3), 2e-3, False),  # two forward passes of half the sessions take twice as long
        ((15e-3, 15e-3), 14e-3, False),
        ((15e-3, 15e-3), 22e-3, True),
        ((15e-3, 15e-3), 40e-3, True),
        ((8e-3, 15e-3), 0.2e-3, False),  # nothing worth hiding
        ((8e-3, 15e-3), 10e-3, True),
    ],
)
@pytest.mark.parametrize("seen", ["both", "joint steps alone"])
def test_two_cohorts_pay_by_measured_times(
    forward_s: tuple[float, float], host_s: float, pays: bool, seen: str
) -> None:
    half, whole = 160, 320
    profiler = StepProfiler(StepCost({half: forward_s[0], whole: forward_s[1]}), new_counters(), overlaps=True)
    assert not profiler.cohorts_pay(64)  # nothing is measured yet
    steps = ((half, 32, forward_s[0]), (whole, 64, forward_s[1]))
    for _ in range(200):
        for rows, sessions, seconds in steps if seen == "both" else steps[1:]:
            profiler.begin()
            profiler._current_s |= {"plan": 0.0, "verify": host_s * sessions / 64, "commit": 0.0}
            profiler.record_step(rows=rows, sessions=sessions, tokens=2 * sessions, prefilled=False, forward_s=seconds)
    assert profiler.cohorts_pay(64) == pays
    assert not profiler.cohorts_pay(1)


def test_sessions_that_come_and_go_get_the_tokens_of_a_plain_loop(rig: Rig, reference: Plain) -> None:
    expected = {}
    for number in range(12):
        prompt, params = prompt_of(4 + 3 * number, number), SAMPLINGS[number % 3]
        tokens = expected[str(number)] = reference("llama").generate(prompt, 20, params)
        draft = (perfect(tokens), adversary(tokens), random_tree)[number % 3]
        rig.attach(str(number), client(prompt, draft, max_tokens=20, sampling=params))
        rig.turn()
    rig.run()
    assert {name: one.device.received for name, one in rig.clients.items()} == expected
    assert rig.slots == (0, 0)


def test_what_comes_while_a_session_is_computed_is_taken_in_after_its_commit(rig: Rig) -> None:
    two_sessions(rig)
    rig.engine.append("a", nodes(3, 4, base=1))
    rig.engine.update("a", pb.SessionUpdate(directive=Directive(window_nodes=1, window_depth=1, nodes_per_step=1)))
    rig.engine.set_draft_release("a", "2")
    session = rig.engine._live["a"]
    assert (len(session.protocol.tree), session.nodes.directive, session.draft_release) == (0, DIRECTIVE, "")
    (event,) = next_events(rig)
    assert isinstance(event, Committed)
    assert event.session_id == "a"
    assert (session.protocol.seen, session.nodes.directive.window_nodes, session.draft_release) == (2, 1, "2")


def test_a_session_that_ends_while_it_is_computed_has_its_commit_first(rig: Rig) -> None:
    two_sessions(rig)
    rig.engine.cancel("a", Cancel(epoch=1))
    commits = [event.commit for event in next_events(rig) if isinstance(event, Committed) and event.session_id == "a"]
    assert [(len(one.token), one.finish) for one in commits] == [(1, Finish.NONE), (0, Finish.CANCELLED)]
    rig.engine.stop("b")
    rig.engine.start("a", attach_of(prompt_of(5), epoch=2, ignore_eos=True), LIMITS, DIRECTIVE)
    rig.engine.stop("a")
    rig.engine.step()
    assert rig.slots == (0, 0)
    assert rig.engine.next_deadline() is None


def test_a_message_that_cannot_be_taken_ends_its_session_alone(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    two_sessions(rig)
    rig.engine.append("a", nodes(3, base=1))
    rig.engine.append("a", nodes(4, base=1, first_id=2))
    monkeypatch.setattr(rig.engine._live["a"], "append", lambda message, now: 1 / 0)
    committed, failed = next_events(rig)
    assert isinstance(committed, Committed)
    assert isinstance(failed, Failed)
    assert (failed.session_id, type(failed.error)) == ("a", InternalError)
    assert [event.session_id for event in next_events(rig) if isinstance(event, Committed)] == ["b"]


def test_prompts_neither_keep_other_sessions_waiting_nor_take_their_time(target: Target, rig: Rig) -> None:
    for number in range(4):
        rig.attach(f"old{number}", client(prompt_of(4, number), nothing, max_tokens=80, ignore_eos=True))
    while not all(one.device.received for one in rig.clients.values()):
        rig.turn()
    before = {name: len(one.device.received) for name, one in rig.clients.items()}
    for number in range(8):
        rig.attach(f"new{number}", client(prompt_of(120, number), nothing, max_tokens=4, ignore_eos=True))
    turns = 0
    while not rig.clients["new0"].device.received:
        rig.turn()
        turns += 1
    for name, count in before.items():
        assert len(rig.clients[name].device.received) - count >= turns // 2 - 1


def test_a_step_that_fails_fails_the_session_at_fault_and_no_other(
    rig: Rig, reference: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = {str(number): prompt_of(6 + number, number) for number in range(4)}
    expected = {name: reference("llama").generate(prompt, 24) for name, prompt in prompts.items()}
    for name, prompt in prompts.items():
        rig.attach(name, client(prompt, perfect(expected[name]), max_tokens=24))
    forward, at_fault = rig.executor.model.forward, rig.engine._live["2"]

    def fails_for_one(batch: PackedBatch, plan: AttentionPlan) -> torch.Tensor:
        mine = rig.executor._segments.get(at_fault)
        if at_fault.computed > 12 and any(segment is mine for segment in batch.segments):
            raise RuntimeError("out of memory")
        return forward(batch, plan)

    monkeypatch.setattr(rig.executor.model, "forward", fails_for_one)
    rig.run()
    assert [type(error) for error in rig.clients.pop("2").errors] == [InternalError]
    assert all(one.device.received == expected[name] for name, one in rig.clients.items())
    assert rig.slots == (0, 0)
