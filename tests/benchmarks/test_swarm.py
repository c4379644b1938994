"""Test light clients against a scripted verifier: they behave as the recorded device, and report what is wrong."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from fake_verifier import FakeVerifier, Script
from scripted import VOCABULARY, ScriptedSource, continuation, target, tokenizer_json

from benchmarks import soak
from benchmarks.soak_findings import SessionTally, VerifierSample, growth
from benchmarks.support import harness
from benchmarks.support.draft_replay.client import (
    LightClient,
    Player,
    ServiceAddress,
    SessionJob,
    SessionOutcome,
    differing,
    options_of,
)
from benchmarks.support.draft_replay.recorder import DraftRecorder, generous
from benchmarks.support.draft_replay.recording import DraftRecording, RecordedRequest, place
from benchmarks.support.draft_replay.source import ReplayedDrafts, ReplayedSource
from benchmarks.support.draft_replay.swarm import Swarm
from edge_agent.drafting.calibrated_source import CalibratedSource
from edge_agent.drafting.drafter import Drafter
from edge_agent.drafting.growth import DecodeLatency
from edge_agent.drafting.pool import DraftOptions, DraftPool
from edge_agent.drafting.sources.base import DraftTask, NodeContext
from edge_agent.drafting.sources.ngram import NgramSource
from edge_agent.drafting.worker import DraftWorker
from edge_agent.sdk.client import AsyncClient
from edge_agent.sdk.types import Completion
from outrider.core.errors import BadRequest
from outrider.core.protocol.messages import Directive, SessionLimits
from outrider.core.sampling import SamplingParams

TOKENS = 64
DECODE_S = 0.001
WIDTHS = DecodeLatency(((1, DECODE_S), (4, 2 * DECODE_S)))
SAMPLED = SamplingParams(temperature=0.8, seed=7)
PROMPTS = [[i, i + 3, 5, 2 * i + 1] for i in range(1, 5)]


def calls(sampling: SamplingParams = SAMPLED) -> list[RecordedRequest]:
    return [
        RecordedRequest(str(i), tuple(prompt), sampling, TOKENS, tuple(continuation(prompt, TOKENS)))
        for i, prompt in enumerate(PROMPTS)
    ]


def record_draft(*, decode_s: float = DECODE_S, quality: float = 0.8) -> DraftRecording:
    """Record a scripted draft that is right with probability `quality`, twice, so that it has learned."""
    plan = generous(Directive(), SessionLimits())
    source = ScriptedSource(quality=quality, decode_s=decode_s)
    recorder = DraftRecorder(source, WIDTHS, plan, vocabulary=VOCABULARY)
    for call in calls():
        recorder.record(call)
    return recorder.finish([recorder.record(call) for call in calls()])


@pytest.fixture(scope="module")
def recorded() -> DraftRecording:
    return record_draft()


class PunctualSource(ScriptedSource):
    """Take a decode's time on average however busy this machine is, as a replay does."""

    _overslept_s = 0.0

    def _work(self) -> None:
        remaining = DECODE_S - self._overslept_s
        if remaining > 0.0:
            begun = time.monotonic()
            time.sleep(remaining)
            remaining -= time.monotonic() - begun
        self._overslept_s = max(0.0, -remaining)


class LivePool(DraftPool):
    """Use the draft itself, with the observations of the recorded one."""

    def __init__(self, recorded: DraftRecording) -> None:
        super().__init__("live", DraftOptions(workers=1))
        self._calibrators = recorded.calibrators()

    def _worker(self) -> DraftWorker:
        greedy, sampled, ngram_greedy, ngram_sampled = self._calibrators
        model = CalibratedSource(PunctualSource(quality=0.8), greedy, sampled, WIDTHS)
        ngram = CalibratedSource(NgramSource(), ngram_greedy, ngram_sampled)
        return DraftWorker(lambda: Drafter([model, ngram]))


@pytest.fixture
def script() -> Script:
    return Script(target, step_s=0.012, vocabulary_size=VOCABULARY + 300, tokenizer_json=tokenizer_json())


@pytest.fixture
async def verifier(script: Script) -> AsyncIterator[FakeVerifier]:
    async with FakeVerifier(script) as running:
        yield running


async def played(
    verifier: FakeVerifier, recorded: DraftRecording, scratch: Path, *jobs: SessionJob
) -> list[SessionOutcome]:
    async with Player(recorded, ServiceAddress(verifier.address, wait_s=0.0), scratch) as player:
        return [await player.play(job) for job in jobs]


async def lived(verifier: FakeVerifier, recorded: DraftRecording, call: RecordedRequest) -> Completion:
    async with AsyncClient(verifier=verifier.address, draft=None) as plain:
        bundle = await plain.prepare()
        async with LightClient(replace(bundle, drafts=LivePool(recorded)), verifier=verifier.address) as client:
            return await client.generate(call.prompt, **options_of(call))


async def test_a_replay_takes_as_many_tokens_per_step_as_the_device_that_was_recorded(
    verifier: FakeVerifier, recorded: DraftRecording, tmp_path: Path
) -> None:
    replays: list[SessionOutcome] = []
    live: list[Completion] = []
    # In turn and several times, so that what else runs here slows both alike.
    for number, call in [*enumerate(calls())] * 4:
        replays += await played(verifier, recorded, tmp_path, SessionJob(number))
        live.append(await lived(verifier, recorded, call))
    assert [(o.wrong, o.finish, o.tokens) for o in replays] == [(0, "length", TOKENS)] * len(live)
    assert sum(o.missed for o in replays) <= 0.02 * sum(o.asked for o in replays)
    replayed_steps, live_steps = sum(o.steps for o in replays), sum(c.statistics.steps for c in live)
    assert live_steps < TOKENS * len(live) / 2.0, "nothing was drafted"
    assert abs(live_steps / replayed_steps - 1.0) < 0.15


async def test_a_draft_that_was_slow_when_it_was_recorded_is_slow_when_it_is_played(
    verifier: FakeVerifier, recorded: DraftRecording, tmp_path: Path
) -> None:
    (quick,) = await played(verifier, recorded, tmp_path, SessionJob(0))
    slowed = replace(recorded, decodes=tuple((width, 0.05) for width, _ in recorded.decodes))
    (slow,) = await played(verifier, slowed, tmp_path, SessionJob(0))
    assert slow.wrong == 0
    assert slow.steps > 1.5 * quick.steps


async def test_a_client_that_is_far_away_waits_both_ways_and_gets_the_same(
    verifier: FakeVerifier, recorded: DraftRecording, tmp_path: Path
) -> None:
    async with Player(recorded, ServiceAddress(verifier.address, rtt_ms=80.0), tmp_path) as player:
        outcome = await player.play(SessionJob(0))
    assert (outcome.tokens, outcome.wrong) == (TOKENS, 0)
    assert outcome.first_token_s is not None
    assert outcome.first_token_s >= 0.12, "half a round trip until the connection is there, a whole one for the token"


async def test_a_live_job_without_the_drafts_file_is_refused(
    verifier: FakeVerifier, recorded: DraftRecording, tmp_path: Path
) -> None:
    with pytest.raises(BadRequest, match="needs the draft's file"):
        await played(verifier, recorded, tmp_path, SessionJob(0, live=True))


async def test_without_a_draft_every_step_brings_one_token(
    verifier: FakeVerifier, recorded: DraftRecording, tmp_path: Path
) -> None:
    (outcome,) = await played(verifier, recorded, tmp_path, SessionJob(0, drafted=False))
    assert (outcome.tokens, outcome.steps, outcome.wrong) == (TOKENS, TOKENS, 0)
    assert len(outcome.gaps_ms) == TOKENS - 1
    assert outcome.first_token_s is not None


async def test_output_that_is_not_the_recorded_one_is_counted(
    verifier: FakeVerifier, recorded: DraftRecording, tmp_path: Path
) -> None:
    verifier.script.target = lambda sequence: (target(sequence) + (len(sequence) == 20)) % VOCABULARY
    (outcome,) = await played(verifier, recorded, tmp_path, SessionJob(0))
    assert outcome.finished
    assert outcome.wrong > 0


def test_what_is_missing_at_the_end_counts_only_for_a_whole_output() -> None:
    assert differing([1, 2], [1, 2, 3], whole=False) == 0
    assert differing([1, 2], [1, 2, 3], whole=True) == 1
    assert differing([1, 2, 3, 4], [1, 2, 3], whole=False) == 1
    assert differing([1, 9, 3], [1, 2, 3], whole=False) == 1


def test_a_place_has_one_name_however_it_is_reached() -> None:
    output = (5, 6, 7)
    assert place(output, 0, (5, 6, 9)) == place(output, 1, (6, 9)) == place(output, 2, (9,)) == (2, (9,))
    assert place(output, 0, (6, 5)) == (0, (6, 5))
    assert place(output, 2, (7, 5)) == (3, (5,))


def test_a_recording_that_was_saved_is_the_same_when_it_is_loaded(recorded: DraftRecording, tmp_path: Path) -> None:
    recorded.save(tmp_path / "recorded.json")
    assert DraftRecording.load(tmp_path / "recorded.json") == recorded


class Sleeps:
    """Advance by sleeping alone, each time by a little too much."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + 1e-4


def test_a_recorded_source_takes_its_recorded_time_however_often_it_sleeps(recorded: DraftRecording) -> None:
    clock = Sleeps()
    source = ReplayedSource(
        replace(recorded, decodes=((1, 0.002),), commit_s=0.0, correction_s=0.002), clock, clock.sleep
    )
    call = recorded.recordings[0].call
    source.begin(DraftTask(call.prompt, (), call.sampling, TOKENS))
    began = clock.now
    for i in range(1, 101):
        source.expand([NodeContext(i, i - 1, call.output[i % 3], i, call.output[:i])])
    assert clock.now - began == pytest.approx(0.2, abs=5e-4)


def test_a_token_that_was_not_evaluated_costs_a_decode_and_one_that_was_does_not(recorded: DraftRecording) -> None:
    clock = Sleeps()
    source = ReplayedSource(
        replace(recorded, decodes=((1, 0.002),), commit_s=0.0, correction_s=0.002), clock, clock.sleep
    )
    call = recorded.recordings[0].call
    source.begin(DraftTask(call.prompt, (), call.sampling, TOKENS))
    source.expand([NodeContext(1, 0, call.output[0], 1, call.output[:1])])
    before = clock.now
    source.advance([1], call.output[:1])
    evaluated, before = clock.now - before, clock.now
    source.advance([], call.output[1:2])
    assert evaluated < 1e-3
    assert clock.now - before == pytest.approx(0.002, abs=3e-4)


async def test_a_request_that_is_not_in_the_recording_goes_on_without_a_draft(
    verifier: FakeVerifier, recorded: DraftRecording, tmp_path: Path
) -> None:
    call = recorded.recordings[0].call
    with pytest.raises(BadRequest, match="no recording"):
        ReplayedSource(recorded).begin(DraftTask(call.prompt, (), SamplingParams(), TOKENS))
    async with AsyncClient(verifier=verifier.address, draft=None) as plain:
        bundle = await plain.prepare()
        async with LightClient(replace(bundle, drafts=ReplayedDrafts(recorded)), verifier=verifier.address) as client:
            completion = await client.generate(call.prompt, max_tokens=TOKENS)
    assert completion.token_ids == call.output
    assert completion.statistics.steps == TOKENS
    assert "no recording" in completion.statistics.draft_failure


@pytest.mark.parametrize("ending", ["cancel", "drop"])
async def test_a_session_that_ends_early_leaves_nothing_at_the_verifier(
    verifier: FakeVerifier, recorded: DraftRecording, tmp_path: Path, ending: str
) -> None:
    (outcome,) = await played(verifier, recorded, tmp_path, SessionJob(0, ending=ending, after=10))  # type: ignore[arg-type]
    assert 10 <= outcome.tokens < TOKENS
    assert outcome.wrong == 0
    assert outcome.finish == ("cancelled" if ending == "cancel" else "")
    async with asyncio.timeout(5.0):
        while verifier.live:  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_a_swarm_plays_in_processes_and_tells_of_their_death(
    verifier: FakeVerifier, recorded: DraftRecording, tmp_path: Path
) -> None:
    recorded.save(tmp_path / "recorded.json")
    async with Swarm(tmp_path / "recorded.json", ServiceAddress(verifier.address), processes=2) as swarm:
        both = await asyncio.gather(swarm.play(SessionJob(0)), swarm.play(SessionJob(1)))
        assert [(o.tokens, o.wrong, o.error) for o in both] == [(TOKENS, 0, "")] * 2
        await swarm.kill()
        verifier.script.step_s = 1.0
        playing = asyncio.create_task(swarm.play(SessionJob(2)))
        await asyncio.sleep(0.2)
        await swarm.kill()
        assert (await playing).error.startswith("Died")


def test_a_process_of_the_swarm_loads_no_model() -> None:
    worker = "benchmarks.support.draft_replay.worker"
    code = f"import sys, {worker}; sys.exit(any(m in sys.modules for m in ('llama_cpp', 'torch')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=harness.ROOT, check=False).returncode == 0


def test_an_outcome_survives_the_way_between_processes() -> None:
    outcome = SessionOutcome(tokens=3, gaps_ms=[1.5], refused_s=[0.25], finish="eos", first_token_s=0.5)
    assert SessionOutcome(**json.loads(json.dumps(asdict(outcome)))) == outcome


def test_the_soak_tells_harm_from_death() -> None:
    tally = SessionTally()
    tally.add(SessionJob(0), SessionOutcome(finish="eos", tokens=3))
    tally.add(SessionJob(0), SessionOutcome(finish="eos", wrong=1))
    tally.add(SessionJob(0), SessionOutcome(error="Died: its process has ended"))
    tally.add(SessionJob(0), SessionOutcome(error="Unavailable: gone"))
    tally.add(SessionJob(0, ending="drop", after=3), SessionOutcome())
    assert dict(tally.endings) == {"finish": 2, "killed": 1, "error": 1, "drop": 1}
    assert (tally.differing, sum(tally.errors.values())) == (1, 1)


def test_the_soak_plans_every_ending_and_the_same_plan_for_the_same_seed(recorded: DraftRecording) -> None:
    plans = [[soak.draw(draw, recorded) for _ in range(200)] for draw in (random.Random(1), random.Random(1))]
    assert plans[0] == plans[1]
    assert {job.ending for job in plans[0]} == set(soak.ENDINGS)


@pytest.mark.parametrize(("slope", "grown"), [(0.0, 0.0), (0.1, 27.0)])
def test_growth_is_that_of_the_span_and_not_of_one_sample(slope: float, grown: float) -> None:
    samples = [VerifierSample(float(t), 400.0 + slope * t, 100.0 + 50.0 * (t == 599), 0, 0) for t in range(600)]
    samples[:100] = [VerifierSample(float(t), 0.0, 0.0, 0, 0) for t in range(100)]
    assert growth(samples, 300.0) == pytest.approx(grown, abs=0.2)
