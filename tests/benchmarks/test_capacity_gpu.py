"""Test the GPU benchmark's accounting on a tiny target on the CPU: times, the draft's work, and differing outputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from tiny_targets import make_tiny
from transformers import AutoModelForCausalLM

from benchmarks import capacity_gpu
from benchmarks.capacity_gpu import arms, fitting, level, measure, memory_needed
from benchmarks.support.engine_driver.configurations import (
    DEVICE,
    PLAIN,
    SERVER,
    Configuration,
    LoadLevel,
    TimedRound,
    TimedStep,
    summary,
)
from benchmarks.support.engine_driver.packed_draft import DraftRequest, PackedDraft
from benchmarks.support.engine_driver.random_models import DRAFTS, SHAPES, random_model
from benchmarks.support.engine_driver.scripted_trees import TreeTally
from benchmarks.support.engine_driver.stepped_engine import WARM, Case, ScriptedDevice, SteppedEngine, Workload
from cloud_verifier.engine.torch_backend.model import TargetModel
from outrider.core.protocol.device import DeviceSession
from outrider.core.protocol.messages import Commit, SessionLimits

CPU = torch.device("cpu")
PLAN = Workload(batches=(3,), nodes=(2, 8), rounds=1, steps=10, prompt=16, profile_s=0.2)
SESSIONS = 3
FIGURES = {"vs_autoregression", "vs_server_draft", "server_draft_bound"}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def bench() -> SteppedEngine:
    return SteppedEngine(random_model(SHAPES["tiny"], CPU), random_model(SHAPES["tiniest"], CPU, seed=1), PLAN)


@pytest.fixture(scope="module")
def cases(bench: SteppedEngine) -> list[Case]:
    return bench.continued([Case(tuple(range(7 * i, 7 * i + PLAN.prompt))) for i in range(SESSIONS)])


def step(draft_s: float = 0.0, verify_s: float = 1.0, devices_s: float = 0.0, tokens: int = 1) -> TimedStep:
    return TimedStep(draft_s, verify_s, devices_s, tokens, full=True)


def rounds(*tokens: int, draft_s: float = 0.0) -> list[TimedRound]:
    return [TimedRound((step(draft_s=draft_s, tokens=count),)) for count in tokens]


def drafter(slots: int = 256) -> PackedDraft:
    """Return a draft whose tokens depend on all that came before."""
    return PackedDraft(TargetModel(make_tiny("llama"), name="tiny"), slots)


def test_every_planned_node_is_accepted_and_the_rate_is_what_was_asked_for(
    bench: SteppedEngine, cases: list[Case]
) -> None:
    tally = TreeTally()
    for number in range(8):
        result = bench.run(cases, Configuration(DEVICE, 8), f"rate {number}", tally)
        assert not result.diverged
    assert tally.steps >= 8 * SESSIONS * (WARM + PLAN.steps)
    assert tally.accepted == tally.planned
    assert tally.rate == pytest.approx(PLAN.rate, abs=0.05)


def test_a_round_has_the_timed_steps_alone_and_each_commits_for_every_session(
    bench: SteppedEngine, cases: list[Case]
) -> None:
    plain = bench.run(cases, Configuration(PLAIN), "plain", TreeTally())
    assert [one.tokens for one in plain.steps] == [SESSIONS] * PLAN.steps
    trees = bench.run(cases, Configuration(DEVICE, 8), "trees", TreeTally())
    assert len(trees.steps) == PLAN.steps
    assert all(SESSIONS <= one.tokens <= 7 * SESSIONS for one in trees.steps)
    assert trees.tokens_per_step > plain.tokens_per_step


def test_the_same_trees_are_accepted_whoever_drafts(bench: SteppedEngine, cases: list[Case]) -> None:
    device, beside = (bench.run(cases, Configuration(kind, 8), "the same", TreeTally()) for kind in (DEVICE, SERVER))
    assert [one.tokens for one in device.steps] == [one.tokens for one in beside.steps]
    assert all(one.draft_s == 0.0 for one in device.steps)
    assert all(one.draft_s > 0.0 for one in beside.steps)


def test_a_server_draft_computes_every_depth_for_all_sessions_in_every_step(
    bench: SteppedEngine, cases: list[Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    worked: list[tuple[int, int, int]] = []
    plainly = bench.draft.propose

    def propose(wishes: Sequence[DraftRequest]) -> list[int]:
        forwards, rows = bench.draft.forwards, bench.draft.rows
        found = plainly(wishes)
        worked.append((bench.draft.forwards - forwards, bench.draft.rows - rows, len(found)))
        return found

    monkeypatch.setattr(bench.draft, "propose", propose)
    bench.run(cases, Configuration(SERVER, 8), "depths", TreeTally())
    depth = 6  # the spine of 8 nodes
    assert len(worked) >= WARM + PLAN.steps
    for forwards, rows, found in worked[1:]:  # the first one may read prompts
        assert forwards == depth
        assert depth * SESSIONS <= rows <= (depth + 1) * SESSIONS  # at most one token more, after a whole chain
        assert found == depth * SESSIONS


def test_a_device_drafts_nothing_beside_the_target(bench: SteppedEngine, cases: list[Case]) -> None:
    before = bench.draft.forwards
    bench.run(cases, Configuration(DEVICE, 8), "nothing", TreeTally())
    bench.run(cases, Configuration(DEVICE, 8, pruned=True), "nothing", TreeTally())
    assert bench.draft.forwards == before


def test_a_session_that_leaves_its_continuation_is_counted_and_no_other(
    bench: SteppedEngine, cases: list[Case]
) -> None:
    truth = list(cases[1].truth)
    truth[5] = (truth[5] + 1) % bench.target.vocab_size
    wrong = [cases[0], replace(cases[1], truth=tuple(truth)), cases[2]]
    tally = TreeTally()
    assert bench.run(wrong, Configuration(DEVICE, 8), "diverged", tally).diverged == {1}
    assert tally.accepted < tally.planned


class DivergingBench:
    """Let the second of three sessions leave its continuation in every configuration."""

    class target:
        vocab_size = 10_000

    def __init__(self) -> None:
        self.plan = replace(PLAN, rounds=2)
        self.prompts: list[list[tuple[int, ...]]] = []

    def continued(self, cases: Sequence[Case]) -> list[Case]:
        self.prompts.append([case.prompt for case in cases])
        return list(cases)

    def run(self, cases: Sequence[Case], arm: Configuration, seed: str, tally: TreeTally) -> TimedRound:
        return TimedRound((step(),), frozenset({1}))


def test_who_strays_has_another_prompt_in_the_next_round_and_the_first_round_is_not_counted() -> None:
    diverging = DivergingBench()
    found = level(cast(SteppedEngine, diverging), SESSIONS)
    assert len(diverging.prompts) == 1 + 3
    for before, after in zip(diverging.prompts, diverging.prompts[1:], strict=False):
        assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]
    every = arms(PLAN.nodes)
    assert set(found.rounds) == set(every)
    assert all(len(counted) == 2 for counted in found.rounds.values())
    assert (found.diverged, found.served) == (2 * len(every), 2 * len(every) * SESSIONS)


def test_a_figure_has_the_drafts_time_in_it_and_not_the_devices() -> None:
    result = TimedRound((step(1.0, 3.0, 100.0, tokens=6), step(2.0, 2.0, 100.0, tokens=10)))
    assert result.tokens_per_s == pytest.approx(2.0)
    assert result.drafting == pytest.approx(0.6)


def test_ratios_are_of_the_best_of_each_sweep_within_rounds() -> None:
    found = LoadLevel()
    found.rounds[Configuration(PLAIN)] = rounds(2, 2, 4)
    found.rounds[Configuration(DEVICE, 2)] = rounds(20, 1, 1)
    found.rounds[Configuration(DEVICE, 8, pruned=True)] = rounds(6, 8, 8)
    found.rounds[Configuration(SERVER, 2)] = rounds(6, 4, 8, draft_s=1.0)
    found.rounds[Configuration(SERVER, 8)] = rounds(6, 8, 8, draft_s=3.0)
    figures = summary({3: found})
    assert figures["best"] == {"3": "device 8 pruned, server draft 2"}
    assert figures["vs_autoregression"] == {"3": 3.0}
    assert figures["vs_server_draft"] == {"3": 2.0}
    assert figures["server_draft_bound"] == {"3": 1.8}


def test_both_sides_are_swept_alike() -> None:
    swept = {(arm.nodes, arm.pruned) for arm in arms((2, 8)) if arm.kind == DEVICE}
    assert swept == {(arm.nodes, arm.pruned) for arm in arms((2, 8)) if arm.kind == SERVER}
    assert swept == {(2, False), (8, False), (8, True)}


def test_what_survives_of_a_tree_is_not_drafted_again() -> None:
    device = ScriptedDevice(DeviceSession([1, 2], max_tokens=64), truth=range(10, 40), nodes=8, rate=1.0, vocabulary=99)
    device.session.attach(1, SessionLimits())
    device.next_append()
    assert device.spine() == [10, 11, 12, 13, 14, 15]
    device.on_commit(Commit(epoch=1, start=0, tokens=(10, 11, 12), seen=8, evaluated=3))
    device.next_append()
    assert len(device.session.tree) == 3
    assert device.spine() == []


def test_a_draft_reads_what_was_refused_and_nothing_twice() -> None:
    draft, prompt = drafter(), [3, 1, 4, 1, 5]
    draft.begin("a", prompt)
    draft.propose([DraftRequest("a", prompt, [9, 2, 6])])
    assert (draft.forwards, draft.rows) == (3, 5 + 2)
    draft.propose([DraftRequest("a", [*prompt, 9, 7], [8])])  # the second draft token was rejected
    assert (draft.forwards, draft.rows) == (4, 7 + 1)
    draft.propose([DraftRequest("a", [*prompt, 9, 7, 8, 5], [3])])  # all came true: its last one was never fed
    assert (draft.forwards, draft.rows) == (5, 8 + 2)
    draft.propose([DraftRequest("a", [*prompt, 9, 7, 8, 5, 3, 1], [2, 4])])
    draft.propose([DraftRequest("a", [*prompt, 9, 7, 8, 5, 3, 1, 7, 4, 6], [2])])  # two commits, none as drafted
    assert (draft.forwards, draft.rows) == (8, 10 + 2 + 1 + 3)


@pytest.mark.parametrize("output", [[9, 2, 7], [9, 7], [7], [7, 2, 6, 5]], ids=str)
def test_a_drafts_cache_gives_what_a_draft_without_one_says(output: list[int]) -> None:
    draft, prompt = drafter(), [3, 1, 4, 1, 5]
    draft.begin("a", prompt)
    draft.propose([DraftRequest("a", prompt, [9, 2, 6])])
    known, chain = [*prompt, *output], [8, 30, 71, 4]
    fresh = drafter()
    fresh.begin("b", known)
    assert draft.propose([DraftRequest("a", known, chain)]) == fresh.propose([DraftRequest("b", known, chain)])


def test_a_draft_gives_every_slot_back_and_keeps_the_prompt_alone_when_a_session_starts_again() -> None:
    draft, prompt = drafter(slots=12), [3, 1, 4, 1, 5]
    for _ in range(5):
        draft.begin("a", prompt)
        draft.propose([DraftRequest("a", prompt, [9, 2, 6])])
        draft.propose([DraftRequest("a", [*prompt, 9, 7], [8, 8])])
    rows = draft.rows
    draft.begin("a", prompt)
    draft.propose([DraftRequest("a", prompt, [9])])
    assert draft.rows == rows + 1
    draft.begin("a", [2, *prompt])
    draft.propose([DraftRequest("a", [2, *prompt], [9])])
    assert draft.rows == rows + 1 + 6


def test_prompts_beyond_a_forwards_rows_are_read_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.support.engine_driver.packed_draft.READ_ROWS", 10)
    draft, prompts = drafter(), [[i, i + 1, i + 2, i + 3] for i in range(5)]
    for i, prompt in enumerate(prompts):
        draft.begin(str(i), prompt)
    found = draft.propose([DraftRequest(str(i), prompt, [7]) for i, prompt in enumerate(prompts)])
    assert (draft.forwards, draft.rows, len(found)) == (3, 20, 5)


def test_a_random_target_is_sure_of_its_tokens_and_says_none_again(bench: SteppedEngine, cases: list[Case]) -> None:
    for case in cases:
        assert len(set(case.truth)) == len(case.truth) == PLAN.output
    logits = bench.target.linear_logits([*cases[0].prompt, *cases[0].truth[:64]])
    first, second = logits.float().topk(2, dim=-1).values.unbind(-1)
    assert float((first / second).min()) > 1.2


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_has_the_parameters_that_it_says(name: str) -> None:
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(SHAPES[name].config())
    assert sum(parameter.numel() for parameter in module.parameters()) == SHAPES[name].parameters


def test_drafts_are_of_5_to_20_percent_of_their_targets() -> None:
    for target, draft in DRAFTS.items():
        if target != "tiny":
            assert 0.05 <= SHAPES[draft].parameters / SHAPES[target].parameters <= 0.2
    assert 7.9e9 < SHAPES["8b"].parameters < 8.1e9


def test_a_shape_that_does_not_fit_is_left_out_with_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    room = memory_needed(SHAPES["1b"], SHAPES["0.2b"], PLAN, CPU)
    monkeypatch.setattr(capacity_gpu, "memory_free", lambda device: room)
    assert fitting(["8b", "1b"], None, PLAN, CPU) == (SHAPES["1b"], SHAPES["0.2b"])
    assert "8b is left out" in capsys.readouterr().out
    monkeypatch.setattr(capacity_gpu, "memory_free", lambda device: room - 1)
    assert measure(device="cpu", shape="1b", plan=PLAN) is None


def test_nothing_is_measured_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert measure() is None


def complete(found: dict[str, Any], batches: Sequence[int]) -> set[str]:
    """Return those of FIGURES that are positive for just these numbers of sessions, in this order."""
    levels = [str(sessions) for sessions in batches]
    return {key for key in FIGURES if list(found[key]) == levels and all(value > 0 for value in found[key].values())}


def test_a_measurement_has_its_figures_for_every_number_of_sessions() -> None:
    plan = replace(PLAN, batches=(1, 2), nodes=(4,), steps=3)
    found = measure(device="cpu", shape="tiny", plan=plan)
    assert found is not None
    assert complete(found, plan.batches) == FIGURES
    assert json.loads(json.dumps(found)) == found
    assert found["diverged_share"] == 0.0
    assert found["vs_server_draft"]["2"] > 1.0  # the draft's time is in it


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_it_runs_on_a_gpu() -> None:
    plan = replace(PLAN, batches=(1, 8), nodes=(4,), steps=3)
    found = measure(device="cuda", shape="tiny", plan=plan)
    assert found is not None
    assert complete(found, plan.batches) == FIGURES
    assert json.loads(json.dumps(found)) == found
