"""Test that replays record predictions, let drafts fail, and yield the device's acceptance histories."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
from fake_verifier import FakeVerifier, Script
from scripted import VOCABULARY, ScriptedSource, continuation, target, tokenizer_json

from benchmarks.support.draft_replay.calibration_probe import ProbedDrafter
from benchmarks.support.draft_replay.client import Player, ServiceAddress, SessionJob, SessionOutcome
from benchmarks.support.draft_replay.recorder import DraftRecorder, generous
from benchmarks.support.draft_replay.recording import DraftRecording, RecordedRequest, copied
from benchmarks.support.draft_replay.rounds import DIRECTIVE, NODES, RoundDrafter
from benchmarks.support.draft_replay.source import ReplayedDrafts
from benchmarks.support.ucb_specstop import UcbSpecStop
from benchmarks.window.draft_recordings import acceptance_histories, match_rate
from edge_agent.drafting.calibrated_source import CalibratedSource
from edge_agent.drafting.growth import DecodeLatency, SpeculationPlan
from edge_agent.drafting.sources.base import DraftTask
from outrider.core.acceptance.calibrator import MARGIN_EDGES, AcceptancePrior, Agreement, Calibrator
from outrider.core.protocol.messages import Directive, SessionLimits
from outrider.core.sampling import SamplingParams

TOKENS = 64
WIDTHS = DecodeLatency(((1, 0.001), (4, 0.002)))
PLAN = SpeculationPlan.of(Directive(), SessionLimits())
SAMPLED = SamplingParams(temperature=0.8, seed=7)
PROMPT = (3, 1, 4, 1, 5)
OUTPUT = tuple(continuation(PROMPT, TOKENS))


def record_draft(quality: float) -> DraftRecording:
    """Record one request twice, so that the draft has learned."""
    recorder = DraftRecorder(
        ScriptedSource(quality=quality), WIDTHS, generous(Directive(), SessionLimits()), vocabulary=VOCABULARY
    )
    call = RecordedRequest("one", PROMPT, SAMPLED, TOKENS, OUTPUT)
    recorder.record(call)
    return replace(recorder.finish([recorder.record(call)]), commit_s=0.001, correction_s=0.001)


async def played(recorded: DraftRecording, scratch: Path, *jobs: SessionJob) -> list[SessionOutcome]:
    script = Script(target, step_s=0.012, vocabulary_size=VOCABULARY + 300, tokenizer_json=tokenizer_json())
    async with (
        FakeVerifier(script) as verifier,
        Player(recorded, ServiceAddress(verifier.address, wait_s=0.0), scratch) as player,
    ):
        return [await player.play(job) for job in jobs]


def probed(source: ScriptedSource) -> ProbedDrafter:
    drafter = ProbedDrafter([CalibratedSource(source, Calibrator(), Calibrator(), WIDTHS)])
    drafter.begin(DraftTask(PROMPT, (), SAMPLED, TOKENS), PLAN)
    return drafter


def sent(drafter: ProbedDrafter, decodes: int) -> int:
    """Draft and send so many times; return how many nodes were sent."""
    for _ in range(decodes):
        drafter.step()
    growth = drafter.harvest(moved=False)
    return len(growth.nodes) if growth else 0


@pytest.mark.parametrize(("committed", "came"), [(OUTPUT[:2], [True, True]), ((96, 96), [])])
def test_a_node_is_settled_when_it_is_text_or_can_be_no_more(committed: Sequence[int], came: list[bool]) -> None:
    drafter = probed(ScriptedSource(quality=1.0))
    nodes = sent(drafter, 3)
    assert drafter.settled == []
    drafter.advance(committed)
    assert [happened for _, happened in drafter.settled if happened] == came
    assert 0 < len(drafter.settled) <= nodes
    assert all(0.0 < acceptance <= 1.0 for acceptance, _ in drafter.settled)


def test_a_prediction_is_the_one_that_was_sent() -> None:
    drafter = probed(ScriptedSource(quality=1.0))
    sent(drafter, 3)
    first = dict(drafter._open)
    drafter.advance(OUTPUT[:1])
    sent(drafter, 1)
    assert {node: drafter._open[node] for node in first if node in drafter._open}.items() <= first.items()
    assert {acceptance for acceptance, _ in drafter.settled} <= set(first.values())


def in_rounds(source: ScriptedSource, bandit: UcbSpecStop | None = None) -> RoundDrafter:
    drafter = RoundDrafter([CalibratedSource(source, Calibrator(), Calibrator(), WIDTHS)], trip_s=0.05, bandit=bandit)
    drafter.begin(DraftTask(PROMPT, (), SAMPLED, TOKENS), SpeculationPlan.of(DIRECTIVE, SessionLimits()))
    return drafter


def requested(drafter: RoundDrafter, most_ahead: int = 8) -> tuple[list[int], list[int]]:
    """Draft one round; return the tokens of the request and of the tree below it once the device has drafted on."""
    request = drafter.harvest(moved=True)
    while request is None:
        request = drafter.harvest(moved=drafter.step())
    for _ in range(most_ahead):
        assert drafter.harvest(moved=drafter.step()) is None
    sent = {node.id for node in request.nodes}
    return [node.token for node in request.nodes], [n.token for n in drafter._tree if n.id not in sent]


def test_a_round_is_one_request_and_what_is_drafted_meanwhile_is_below_one_token_after_the_likeliest_path() -> None:
    drafter = in_rounds(ScriptedSource(quality=1.0))
    request, ahead = requested(drafter)
    assert 0 < len(request) <= NODES
    assert ahead
    path = drafter._tree.path(drafter._head)
    grandparents = {drafter._tree[n.parent].parent for n in drafter._tree if n.id != drafter._head and n.parent != 0}
    assert tuple(path) == OUTPUT[: len(path)]
    children = list(drafter._tree.children(drafter._head).values())
    assert sum(bool(drafter._tree.children(child)) for child in children) == 1
    assert drafter._head in grandparents


@pytest.mark.parametrize("right", [True, False])
def test_what_was_drafted_meanwhile_is_part_of_the_next_request_if_the_answer_was_guessed(right: bool) -> None:
    drafter = in_rounds(ScriptedSource(quality=1.0))
    requested(drafter)
    accepted = len(drafter._tree.path(drafter._head))
    drafter.advance(OUTPUT[: accepted + 1] if right else (*OUTPUT[:accepted], OUTPUT[accepted] + 1))
    kept = {node.token for node in drafter._tree}
    assert bool(kept) is right
    request, _ = requested(drafter)
    assert kept <= set(request)


def test_by_a_bandit_each_round_has_the_levels_that_it_chose_and_nothing_is_drafted_meanwhile() -> None:
    drafter = in_rounds(ScriptedSource(quality=1.0), UcbSpecStop(most=3))
    at = 0
    for levels in (1, 1, 2, 3):  # the round that waits for the prompt is not counted
        _, ahead = requested(drafter)
        assert max(item.depth for item in drafter._ranked()) == levels
        assert not ahead
        drafter.advance(OUTPUT[at : at + levels + 1])
        at += levels + 1


def test_tokens_that_come_before_the_answer_do_not_begin_a_round() -> None:
    drafter = in_rounds(ScriptedSource(quality=1.0))
    requested(drafter)
    drafter.advance(OUTPUT[:1])  # what the prompt alone brought
    assert [drafter.harvest(moved=drafter.step()) for _ in range(4)] == [None] * 4
    drafter.advance(OUTPUT[1:40])
    assert requested(drafter)[0]


@pytest.mark.parametrize("scheme", ["specedge", "ucb"])
async def test_a_session_in_rounds_delivers_the_recorded_output(
    tmp_path: Path, scheme: Literal["specedge", "ucb"]
) -> None:
    (outcome,) = await played(record_draft(0.8), tmp_path, SessionJob(0, rounds=scheme, rtt_ms=10.0))
    assert (outcome.wrong, outcome.error, outcome.tokens) == (0, "", TOKENS)
    assert outcome.accepted > 0
    assert outcome.appends <= outcome.steps + 2


async def test_what_became_of_the_predictions_travels_with_the_outcome(tmp_path: Path) -> None:
    (outcome,) = await played(record_draft(0.8), tmp_path, SessionJob(0, probed=True))
    assert outcome.wrong == 0
    assert len(outcome.predicted) == len(outcome.happened) > 20
    assert 0 < sum(outcome.happened) < len(outcome.happened)
    (unprobed,) = await played(record_draft(0.8), tmp_path, SessionJob(0))
    assert unprobed.predicted == unprobed.happened == []


async def test_a_spoiled_draft_is_wrong_within_its_span_and_right_after_it(tmp_path: Path) -> None:
    good, wrong, half = await played(
        record_draft(1.0),
        tmp_path,
        SessionJob(0),
        SessionJob(0, wrong_span=(0, TOKENS)),
        SessionJob(0, wrong_span=(0, TOKENS // 2)),
    )
    assert [outcome.wrong for outcome in (good, wrong, half)] == [0, 0, 0]
    assert wrong.accepted == 0
    assert wrong.evaluated > 0
    assert 0 < half.accepted < good.accepted


async def test_a_session_may_be_ended_by_time(tmp_path: Path) -> None:
    (outcome,) = await played(record_draft(0.0), tmp_path, SessionJob(0, ending="cancel", after=TOKENS, seconds=0.2))
    assert 0 < outcome.tokens < TOKENS
    assert outcome.finish == "cancelled"


def test_a_recorded_draft_expects_what_was_measured_elsewhere_until_it_has_learned() -> None:
    without_lessons = replace(record_draft(0.8), lessons=((), (), (), ()))
    informed, uninformed = ReplayedDrafts(without_lessons), ReplayedDrafts(without_lessons)
    informed.apply_prior(AcceptancePrior(first=0.1, sibling=0.0, positions=256))
    learned, also_informed = ReplayedDrafts(record_draft(0.8)), ReplayedDrafts(record_draft(0.8))
    also_informed.apply_prior(AcceptancePrior(first=0.1, sibling=0.0, positions=256))
    sampled = [
        drafts._model_calibrators[1].probability(0, 2.0, 1) for drafts in (informed, uninformed, learned, also_informed)
    ]
    assert sampled[0] < 0.5 * sampled[1]
    assert sampled[2] == sampled[3] or abs(sampled[2] - sampled[3]) < abs(sampled[0] - sampled[1])


def test_drafts_of_two_recordings_are_two_releases() -> None:
    recorded = record_draft(0.8)
    assert ReplayedDrafts(recorded, release="a").release != ReplayedDrafts(recorded, release="b").release


async def test_a_job_may_say_how_far_away_it_is(tmp_path: Path) -> None:
    near, far = await played(
        record_draft(0.8), tmp_path, SessionJob(0, drafted=False), SessionJob(0, drafted=False, rtt_ms=200.0)
    )
    assert near.wire_up == 0 < far.wire_up
    assert (far.first_token_s or 0.0) > (near.first_token_s or 0.0) + 0.2


def test_observations_are_those_of_the_device_that_was_recorded() -> None:
    perfect, poor = (match_rate(acceptance_histories(record_draft(quality), PLAN)[0]) for quality in (1.0, 0.3))
    assert perfect == 1.0
    assert 0.3 <= poor < 0.8  # of its rejected first proposals half have the right one beside them


def test_a_copied_calibrator_knows_the_same_and_learns_alone() -> None:
    calibrator = Calibrator()
    calibrator.start_from(AcceptancePrior(0.9, 0.5, 500))
    for accepted in (True, False, True):
        calibrator.observe(0, 0.7, 3, accepted, Agreement.FIRST)
    copy = copied(calibrator)
    places = [(rank, margin, depth) for rank in range(4) for margin in (0.0, *MARGIN_EDGES) for depth in (1, 3, 9)]
    before = [calibrator.probability(*place) for place in places]
    assert [copy.probability(*place) for place in places] == before
    for _ in range(50):
        copy.observe(0, 0.7, 3, False)
    assert [calibrator.probability(*place) for place in places] == before
    assert copy.probability(0, 0.7, 3) < calibrator.probability(0, 0.7, 3)
    copy.start_from(AcceptancePrior(0.1, 0.1, 500))
    assert copy.observations == calibrator.observations + 50
    assert [calibrator.probability(*place) for place in places] == before
