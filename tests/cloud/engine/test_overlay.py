"""Test the verifier's own nodes: merged and ranked with the device's, paid for, and without a say in the output."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import count

import numpy as np
import pytest
from rig import Drafter, Rig, adversary, client, nothing, perfect, prompt_of, random_tree
from tiny_targets import VOCAB, Reference

from cloud_verifier.engine.config import EngineConfig
from cloud_verifier.engine.nodes import ProposedTree
from cloud_verifier.engine.row_allocation import by_acceptance
from cloud_verifier.engine.server_draft.base import ProposalRequest, ServerSource
from cloud_verifier.engine.server_draft.ngram import ServerNgramSource
from cloud_verifier.engine.server_draft.overlay import Overlay
from cloud_verifier.engine.step_profiler import StepProfiler
from cloud_verifier.engine.torch_backend.model import TargetModel
from outrider.core.sampling import SamplingParams
from outrider.core.step_cost import StepCost
from outrider.core.tree import ROOT

Target = Callable[[str], TargetModel]
Plain = Callable[[str], Reference]

SAMPLING = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8, top_p=0.9, seed=5),
    "penalties": SamplingParams(temperature=0.7, repetition_penalty=1.3, frequency_penalty=0.2, seed=3),
}
DRAFTERS: dict[str, Callable[[Sequence[int]], Drafter]] = {
    "no draft": lambda expected: nothing,
    "a perfect draft": perfect,
    "random trees": lambda expected: random_tree,
    "an adversary": adversary,
}


class Knowing(ServerSource):
    """A source that knows what the target will generate, as one could that knows noise and target."""

    def __init__(self, expected: Mapping[str, Sequence[int]], right: float = 1.0, name: str = "knowing") -> None:
        """right: probability that a node of the path is the target's token rather than another one."""
        super().__init__()
        self.name = name
        self.asked = 0
        self._expected = expected
        self._right = right
        self._rng = random.Random(7)

    def propose(self, requests: Sequence[ProposalRequest]) -> dict[str, ProposedTree]:
        self.asked += len(requests)
        return {one.session.session_id: self._tree(one) for one in requests}

    def release(self, session_id: str) -> None:
        pass

    def _tree(self, request: ProposalRequest) -> ProposedTree:
        position = request.session.protocol.position
        tree, parent = ProposedTree(position), ROOT
        for token in self._expected[request.session.session_id][position : position + 4]:
            if self._rng.random() >= self._right:
                token = (token + 1 + self._rng.randrange(VOCAB - 1)) % VOCAB
            tree.propose(parent, (token + 1) % VOCAB, 0)  # a wrong sibling, proposed before the right one
            parent = tree.propose(parent, token, 6)
        return tree


def rig_with(model: TargetModel, *sources: ServerSource, **options: object) -> Rig:
    overlay = Overlay(sources, clock=lambda: 0.0)
    return Rig(model, EngineConfig(kv_slots=4096, max_sessions=32), overlay=overlay, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("sampling", SAMPLING)
def test_tokens_are_the_targets_own_with_every_mixture_of_sources_and_devices(
    sampling: str, drafter: str, target: Target, reference: Plain
) -> None:
    params = SAMPLING[sampling]
    prompts = {f"s{i}": prompt_of(5 + 6 * i) for i in range(4)}
    expected = {name: reference("llama").generate(prompt, 40, params) for name, prompt in prompts.items()}
    rig = rig_with(
        target("llama"),
        ServerNgramSource(),
        Knowing(expected),
        Knowing(expected, right=0.3, name="liar"),
    )
    for name, prompt in prompts.items():
        joining = client(prompt, DRAFTERS[drafter](expected[name]), max_tokens=40, sampling=params)
        rig.attach(name, joining)
    rig.run()
    for name in prompts:
        assert rig.clients[name].device.received == expected[name]
    assert rig.slots == (0, 0)
    assert rig.engine.counters.server_accepted > 0 or drafter == "a perfect draft"


def test_no_node_of_the_verifiers_takes_a_row_that_a_devices_is_worth_more_for(
    target: Target, reference: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows are dear, and the source is right once in three: devices that are right get as much as without it."""
    monkeypatch.setattr(StepProfiler, "between_s", 0.0)  # the speed of this machine decides nothing
    cost = StepCost({1: 0.003, 2: 0.004, 2000: 2.002})
    prompts = {f"s{i}": prompt_of(12 + i) for i in range(12)}
    expected = {name: reference("llama").generate(one, 120, ignore_eos=True) for name, one in prompts.items()}
    found = {}
    for sources in (False, True):
        steady = StepCost(cost.table())
        steady.observe = lambda rows, sessions, seconds: None  # type: ignore[method-assign]
        source = Knowing(expected, right=0.35)
        rig = rig_with(target("llama"), *([source] if sources else []), allocation=by_acceptance, cost=steady)
        for i, (name, prompt) in enumerate(prompts.items()):
            draft = perfect(expected[name]) if i % 2 else nothing
            rig.attach(name, client(prompt, draft, max_tokens=120, ignore_eos=True))
        rig.run()
        telemetry = rig.engine.telemetry
        found[sources] = [telemetry[f"s{i}"].committed / telemetry[f"s{i}"].steps for i in range(1, 12, 2)]
        if sources:
            assert rig.engine.counters.server_evaluated < 0.5 * rig.engine.counters.evaluated
    assert np.mean(found[True]) >= 0.97 * np.mean(found[False])


def test_a_source_that_fails_is_dropped_and_the_others_go_on(target: Target, reference: Plain) -> None:
    class Broken(Knowing):
        def propose(self, requests: Sequence[ProposalRequest]) -> dict[str, ProposedTree]:
            raise RuntimeError("no memory")

    prompt = prompt_of(9)
    expected = {"s": reference("llama").generate(prompt, 30, ignore_eos=True)}
    rig = rig_with(target("llama"), Broken(expected, name="broken"), Knowing(expected))
    rig.attach("s", client(prompt, nothing, max_tokens=30, ignore_eos=True))
    rig.run()
    assert rig.clients["s"].device.received == expected["s"]
    assert list(rig.engine.counters.sources) == ["knowing"]


@pytest.mark.parametrize("method", ["observe", "draft", "extend"])
def test_sessions_go_on_without_sources_after_an_error_that_is_none_of_theirs(
    target: Target, reference: Plain, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = prompt_of(9)
    expected = {"s": reference("llama").generate(prompt, 30, ignore_eos=True)}
    rig = rig_with(target("llama"), Knowing(expected))
    rig.attach("s", client(prompt, nothing, max_tokens=30, ignore_eos=True))
    hear(rig)
    hear(rig)
    monkeypatch.setattr(rig.engine._overlay, method, lambda *_: {}["session"])
    rig.run()
    assert rig.clients["s"].device.received == expected["s"]
    assert not rig.engine._overlay.has_sources


def hear(rig: Rig) -> None:
    """Make a call of the engine, and deliver its commits."""
    for event in rig.engine.step():
        rig.hear(event)


def test_nodes_that_come_while_the_verifier_drafts_are_in_the_same_step(target: Target, reference: Plain) -> None:
    prompt = prompt_of(9)
    expected = reference("llama").generate(prompt, 80, ignore_eos=True)
    rig = rig_with(target("llama"), Knowing({"s": expected}, right=0.0))
    rig.attach("s", client(prompt, nothing, max_tokens=80, ignore_eos=True))
    device, counters = rig.clients["s"].device, rig.engine.counters
    rig.turn()  # the prompt
    while not device.finished:
        before, accepted = counters.steps, rig.engine.telemetry["s"].accepted
        hear(rig)
        assert counters.steps == before, "the first call drafts alone"
        perfect(expected)(device, rig.rng)
        while (append := device.poll(resting=True)) is not None:
            rig.engine.append("s", append)
        hear(rig)
        assert counters.steps == before + 1
        assert device.finished or rig.engine.telemetry["s"].accepted > accepted
    assert device.received == expected
    assert counters.sources["knowing"].evaluated > 0


def test_a_source_that_does_not_pay_is_asked_now_and_then_until_it_pays_again(
    target: Target, reference: Plain, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StepProfiler, "token_s", 0.02)
    monkeypatch.setattr(StepProfiler, "min_acceptance", 0.0)
    prompt = prompt_of(9)
    expected = reference("llama").generate(prompt, 240, ignore_eos=True)
    source = Knowing(dict.fromkeys("abcd", expected), right=0.0)
    overlay = Overlay([source], clock=count(step=0.002).__next__)  # each answer takes 2 ms
    rig = Rig(target("llama"), EngineConfig(kv_slots=4096), overlay=overlay)

    def share_asked(session: str) -> float:
        """Return the share of a session's steps that the source was asked in."""
        asked, begun = source.asked, rig.engine.counters.steps
        rig.attach(session, client(prompt, nothing, max_tokens=240, ignore_eos=True))
        rig.run()
        return (source.asked - asked) / (rig.engine.counters.steps - begun)

    share_asked("a")
    assert share_asked("b") == pytest.approx(1 / 32, abs=0.01), "none of its nodes is ever accepted"
    source._right = 1.0
    share_asked("c")
    assert share_asked("d") > 0.9


class KnowingLate(Knowing):
    """One that finds nothing at first, as n-grams do."""

    def _tree(self, request: ProposalRequest) -> ProposedTree:
        position = request.session.protocol.position
        return super()._tree(request) if position >= 20 else ProposedTree(position)


def test_a_source_is_not_paused_because_it_finds_nothing_at_first(target: Target, reference: Plain) -> None:
    prompt = prompt_of(9)
    expected = {"s": reference("llama").generate(prompt, 60, ignore_eos=True)}
    overlay = Overlay([KnowingLate(expected)], clock=count(step=1e-6).__next__)
    rig = Rig(target("llama"), EngineConfig(kv_slots=4096), overlay=overlay)
    rig.attach("s", client(prompt, nothing, max_tokens=60, ignore_eos=True))
    rig.run()
    assert rig.engine.counters.server_accepted > 20
