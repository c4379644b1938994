"""Test the conclusions of soak and overload from their observations, and that the attacker attacks."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fake_verifier import FakeVerifier, Script
from scripted import VOCABULARY, target

from benchmarks import overload, soak
from benchmarks.overload import EndedSession, Goodput, RefusalCost
from benchmarks.soak_findings import SessionTally, SoakFindings, VerifierSample
from benchmarks.support import malicious_client, proc
from benchmarks.support.draft_replay.client import ServiceAddress, SessionJob, SessionOutcome
from benchmarks.support.harness import Size, quantile
from benchmarks.support.malicious_client import ATTACKS, RIGHT, WAITING, Attack, MaliciousClient
from benchmarks.support.phases import AlternatingPhases, DeliveryGap, Phase
from outrider.core.protocol.messages import SessionLimits


class Pool:
    """Act as an engine that promises slots, of which some are lost."""

    def __init__(self, capacity: int, lost: int) -> None:
        self.free = capacity - lost

    async def holds(self, stack: object, where: ServiceAddress, slots: int) -> bool:
        assert slots <= soak.MAX_SEQUENCE + soak.TREE_NODES, "the verifier would refuse it as too long"
        if slots > self.free:
            return False
        if not getattr(stack, "tried", False):
            self.free -= slots if slots >= soak.MAX_SEQUENCE else 0  # smaller ones are tried and given back
        return True


@pytest.mark.parametrize("lost", [0, 1, 700, 2_500])
async def test_slots_that_are_not_promised_any_more_are_found_to_the_last_one(
    monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    capacity = soak.KV_SLOTS
    monkeypatch.setattr(soak, "_holds", Pool(capacity, lost).holds)
    assert await soak.missing_slots(ServiceAddress("nowhere:1"), capacity) == lost


def findings(
    tally: SessionTally | None = None, *, answers: Iterable[tuple[str, str]] = (), **seen: Any
) -> SoakFindings:
    """Return the findings of a minute in which nothing went wrong but what is given."""
    attacker = MaliciousClient(ServiceAddress("nowhere:1"), random.Random(0), [1])
    attacker.answers.update(answers)
    samples = [VerifierSample(float(t), 80.0, 700.0, 10, 2) for t in range(60)]
    return SoakFindings(
        tally or SessionTally(), attacker, **{"phases": AlternatingPhases(), "samples": samples, "seconds": 60.0} | seen
    )


def failures(found: SoakFindings, size: Size = Size.FULL) -> dict[str, str]:
    """Return name -> value of the criteria that a run of this size fails."""
    return {criterion.name: criterion.found for criterion in found.criteria() if criterion.fails(size)}


def last_line(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    last: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return last


def test_the_soak_fails_for_leaks_for_differing_outputs_for_errors_and_for_an_attack_that_was_let_in() -> None:
    failed = SessionTally()
    failed.add(SessionJob(0), SessionOutcome(error="Unavailable: gone"))
    assert failures(findings()) == {}
    assert failures(findings(kv_used=1, missing=2), Size.SMOKE) == {"slots leaked": "3"}
    for found in (
        findings(live=1),
        findings(SessionTally(differing=1)),
        findings(failed),
        findings(answers=[("forged_ticket", "OK")]),
        findings(answers=[("garbage", "INTERNAL")]),
    ):
        assert [list(failures(found, size).values()) for size in Size] == [["1"]] * 3


def test_a_long_soak_fails_for_growth_and_for_an_attack_that_was_never_made() -> None:
    grown = [VerifierSample(float(t), 80.0 + 0.1 * t, 700.0, 0, 0) for t in range(600)]
    every = [(attack, next(iter(endings - malicious_client.NO_PLACE))) for attack, endings in RIGHT.items()]
    long: dict[str, Any] = {"tally": paced(30.0, 30.0), "phases": BOTH, "seconds": 600.0}
    assert failures(findings(answers=every, **long)) == {}
    assert list(failures(findings(answers=every, samples=grown, **long)).values()) == ["27.1"]
    refused = [(attack, "Overloaded" if attack == "id_gap" else ended) for attack, ended in every]
    assert list(failures(findings(answers=refused, **long))) == ["attacks never made"]


def sampled(slope_mb: float, wobble_mb: float) -> list[VerifierSample]:
    """Return an hour of samples of a memory that grows by so much an hour and wobbles beside it, every 20 minutes."""
    return [
        VerifierSample(float(t), 80.0 + slope_mb * t / 3600 + wobble_mb * math.sin(t / 190), 700.0, 0, 0)
        for t in range(0, 3600, 5)
    ]


@pytest.mark.parametrize(
    ("slope_mb", "wobble_mb", "sessions", "fails"),
    [
        (0.0, 0.1, 5_000, False),
        (8.0, 0.1, 5_000, True),
        (8.0, 0.1, 10_000, False),
        (2.0, 20.0, 5_000, True),
    ],
)
def test_an_hour_fails_for_memory_that_may_grow_by_more_than_a_kilobyte_a_session(
    slope_mb: float, wobble_mb: float, sessions: int, fails: bool
) -> None:
    every = [(attack, next(iter(endings - malicious_client.NO_PLACE))) for attack, endings in RIGHT.items()]
    tally = paced(30.0, 30.0)
    tally.endings["finish"] = sessions
    samples = sampled(slope_mb, wobble_mb)
    found = failures(findings(tally, answers=every, phases=BOTH, seconds=3_600.0, samples=samples))
    assert any("in the last half" in name for name in found) is fails
    if wobble_mb < 1.0:
        assert findings(seconds=3_600.0, samples=samples).slope_mb[0] == pytest.approx(slope_mb, abs=0.5)


def test_a_long_soak_fails_where_the_attacker_slows_its_neighbours() -> None:
    every = [(attack, next(iter(endings - malicious_client.NO_PLACE))) for attack, endings in RIGHT.items()]
    harmed = findings(paced(30.0, 90.0), answers=every, phases=BOTH, seconds=600.0)
    assert failures(harmed) == {"p99 with the attacker over without": "3"}


BOTH = AlternatingPhases([Phase(0.0, 10.0, False), Phase(10.0, 20.0, True)])


def paced(alone_ms: float, attacked_ms: float) -> SessionTally:
    """Return gaps of so many ms without the attacker and beside it."""
    return SessionTally(
        gaps=[DeliveryGap(float(t), alone_ms if t < 10 else attacked_ms) for t in range(1, 20) if t != 10]
    )


def test_the_soak_tells_gaps_with_the_attacker_beside_those_without(capsys: pytest.CaptureFixture[str]) -> None:
    phases = AlternatingPhases([Phase(0.0, 10.0, False), Phase(10.0, 20.0, True), Phase(20.0, 30.0, False)])
    tally = SessionTally()
    tally.add(SessionJob(0), SessionOutcome(delivered_s=[1.0, 2.0, 2.0, 4.0], gaps_ms=[1000.0, 2000.0]))
    tally.add(SessionJob(0), SessionOutcome(delivered_s=[9.0, 12.0, 13.5, 31.0], gaps_ms=[3000.0, 1500.0, 17_500.0]))
    findings(tally, phases=phases).report()
    last = last_line(capsys)
    assert (last["leaked_slots"], last["rss_growth_mb"]) == (0, 0.0)
    assert (last["p50_ms"], last["p99_ms"]) == (1500.0, 1500.0)
    assert (last["p50_ms_without_attacker"], last["p99_ms_without_attacker"]) == (2000.0, 2000.0)


def test_a_gap_across_a_border_counts_for_neither_side() -> None:
    phases = AlternatingPhases([Phase(0.0, 1.0, False), Phase(1.0, 2.0, True)])
    gaps = [DeliveryGap(0.5, 100.0), DeliveryGap(1.05, 100.0), DeliveryGap(1.5, 100.0), DeliveryGap(2.05, 100.0)]
    assert (phases.of(gaps, disturbed=False), phases.of(gaps, disturbed=True)) == ([[100.0]], [[100.0]])


async def test_phases_alternate_until_the_end_and_the_last_one_is_cut_short() -> None:
    phases, ends = AlternatingPhases(), []

    async def disturb(until: float) -> None:
        ends.append(until)
        await asyncio.sleep(until - time.monotonic())

    until = time.monotonic() + 0.35
    await phases.alternate(disturb, phase_s=0.1, warm_s=0.05, until=until)
    assert [s.disturbed for s in phases.phases] == [False, True, False]
    assert [s.begin >= before.end for before, s in itertools.pairwise(phases.phases)] == [True, True]
    assert ends[0] <= phases.phases[1].end
    assert phases.phases[-1].end >= until


def ended(at: float, tokens: int, finish: str = "length") -> EndedSession:
    return EndedSession(at, SessionOutcome(tokens=tokens, finish=finish))


def test_goodput_counts_what_has_finished_within_the_window() -> None:
    rate = Goodput.of([ended(5.0, 50), ended(5.1, 60), ended(9.5, 7, ""), ended(10.0, 40), ended(10.1, 50)], 5.0, 10.0)
    assert (rate.tokens_per_s, rate.sessions_per_s) == (20.0, 0.4)


async def test_sessions_that_outlast_the_counted_time_are_waited_for() -> None:
    class SlowSwarm:
        async def play(self, job: SessionJob) -> SessionOutcome:
            await asyncio.sleep(0.3)
            return SessionOutcome(tokens=30, finish="length")

    swarm, recorded = cast(Any, SlowSwarm()), cast(Any, SimpleNamespace(recordings=(None,)))
    load = overload.LoadGenerator(swarm, recorded, min(os.sched_getaffinity(0)))
    rate = await load.closed(2, replace(overload.SMOKE, warm_s=0.0, count_s=0.05))
    assert 2 / 1.0 < rate.sessions_per_s <= 2 / 0.3
    assert rate.tokens_per_s == pytest.approx(30 * rate.sessions_per_s)
    assert len(load.ended) >= 2


def outcomes(*, errors: Iterable[str] = ()) -> list[SessionOutcome]:
    return [
        SessionOutcome(tokens=9, finish="length"),
        *(SessionOutcome(error=error, refused_s=[0.01]) for error in errors),
    ]


def test_overload_fails_if_a_criterion_does_not_hold(capsys: pytest.CaptureFixture[str]) -> None:
    peak, cheap = Goodput(100.0, 2.0), RefusalCost(0.5, 1.0, 500.0, 100)
    overload._finish(cheap, 16, peak, Goodput(81.0, 1.6), 9, outcomes(errors=["Overloaded: full"]), 0.89)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["goodput_share_of_peak"], last["shed"], last["refusal_p50_ms"]) == (0.81, 1, 10.0)
    for cost, rate, errors, busy in (
        (cheap, Goodput(79.0, 1.6), [], 0.5),
        (RefusalCost(100.0, 1.0, 500.0, 100), Goodput(81.0, 1.6), [], 0.5),
        (RefusalCost(0.5, 1.0, 500.0, 99), Goodput(81.0, 1.6), [], 0.5),
        (cheap, Goodput(81.0, 1.6), ["Unavailable: gone"], 0.5),
        (cheap, Goodput(81.0, 1.6), [], 0.91),
    ):
        with pytest.raises(SystemExit):
            overload._finish(cost, 16, peak, rate, 9, outcomes(errors=errors), busy)


@pytest.mark.parametrize(
    ("attack", "answer"),
    [
        (MaliciousClient.id_gap, "INVALID_ARGUMENT"),
        (MaliciousClient.same_siblings, "INVALID_ARGUMENT"),
        (MaliciousClient.too_deep, "INVALID_ARGUMENT"),
        (MaliciousClient.base_of_the_future, "INVALID_ARGUMENT"),
    ],
)
async def test_an_attack_gets_through_to_the_protocol_and_is_refused_there(attack: Attack, answer: str) -> None:
    script = Script(target, vocabulary_size=VOCABULARY, limits=SessionLimits(depth=32), ping_s=60.0)
    async with FakeVerifier(script) as verifier:
        attacker = MaliciousClient(ServiceAddress(verifier.address), random.Random(0), [1, 2, 3])
        assert await attacker.one(attack) == answer
        assert verifier.opens, "the attack never got as far as a session"


@pytest.mark.parametrize(
    "attack", [MaliciousClient.parent_of_the_future, MaliciousClient.after_the_end, MaliciousClient.flood]
)
async def test_how_an_attack_ends_is_among_the_endings_that_are_right_for_it(attack: Attack) -> None:
    async with FakeVerifier(Script(target, vocabulary_size=VOCABULARY, ping_s=60.0)) as verifier:
        attacker = MaliciousClient(ServiceAddress(verifier.address), random.Random(0), [1, 2, 3])
        await attacker.one(attack)
        assert not attacker.wrong, attacker.wrong
        assert attack.__name__ not in attacker.not_made


async def test_a_defect_of_the_server_is_not_an_ending_that_is_right() -> None:
    async with FakeVerifier(Script(target, vocabulary_size=VOCABULARY, ping_s=60.0, older=True)) as verifier:
        attacker = MaliciousClient(ServiceAddress(verifier.address), random.Random(0), [1, 2, 3])
        assert await attacker.one(MaliciousClient.garbage) == "UNKNOWN", (
            "the scripted verifier does not catch a DecodeError"
        )
        assert attacker.wrong.total() == 1


async def test_an_attack_that_nobody_answers_is_not_one_that_ended_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(malicious_client, "ATTACK_S", 0.2)
    async with FakeVerifier(Script(target, vocabulary_size=VOCABULARY, ping_s=60.0)) as verifier:
        attacker = MaliciousClient(ServiceAddress(verifier.address), random.Random(0), [1, 2, 3])
        assert await attacker.one(MaliciousClient.no_open) == "went on"
        assert attacker.wrong.total() == 1


async def test_every_attack_has_its_turn_over_several_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    attacker = MaliciousClient(ServiceAddress("nowhere:1"), random.Random(0), [1])
    made: list[Attack] = []

    async def one(attack: Attack) -> str:
        made.append(attack)
        return "OK"

    monkeypatch.setattr(attacker, "one", one)
    monkeypatch.setattr(random.Random, "uniform", lambda *_: 0.0)
    round_ = len(ATTACKS) - len(WAITING)

    def acting() -> list[Attack]:
        return [attack for attack in made if attack not in WAITING]

    # On a busy machine a phase may be too short for more than one of them.
    while len(acting()) < 2 * round_ or not set(made) >= WAITING:
        await attacker.run(time.monotonic() + 1e-3)
    assert set(acting()[:round_]) == set(acting()[round_ : 2 * round_]) == ATTACKS.keys() - WAITING
    assert set(made) == ATTACKS.keys()


def test_a_quantile_is_a_value_that_was_measured() -> None:
    assert quantile([], 0.5) is None
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert quantile([3.0, 1.0, 2.0], 0.99) == 3.0
    assert quantile(list(range(100)), 0.99) == 99


def test_a_core_is_busy_while_a_process_computes_there() -> None:
    core = min(os.sched_getaffinity(0))
    code = f"import os, time; os.sched_setaffinity(0, [{core}])\nwhile time.process_time() < 1.0: pass"
    before = proc.busy_seconds(core)
    subprocess.run([sys.executable, "-c", code], check=True)
    assert proc.busy_seconds(core) - before > 0.8


async def test_a_family_is_the_process_and_all_below_it_and_nobody_else() -> None:
    child = await asyncio.create_subprocess_exec(sys.executable, "-c", "input()", stdin=subprocess.PIPE)
    try:
        assert child.pid in proc.family(os.getpid())
        assert os.getpid() not in proc.family(child.pid)
        assert proc.rss_mb(os.getpid()) > 10.0
        assert proc.cpu_seconds(os.getpid()) > 0.0
    finally:
        child.kill()
        await child.wait()
    assert proc.rss_mb(child.pid) == proc.cpu_seconds(child.pid) == 0.0
