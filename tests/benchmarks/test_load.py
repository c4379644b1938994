"""What soak and overload conclude from what they saw, and that the attacker attacks."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable

import pytest
from fake_verifier import FakeVerifier, Script
from scripted import VOCABULARY, target

from benchmarks import overload, proc, soak
from benchmarks.harness import percentile
from benchmarks.hostile import Attack, Hostile
from benchmarks.overload import Ended, Price, Rate
from benchmarks.replay import Job, Outcome, Where
from benchmarks.soak import Sample, Tally
from outrider.core.protocol.messages import SessionLimits
from outrider.wire.v1 import coordinator_pb2 as pb


class Pool:
    """An engine that promises slots, of which some are lost."""

    def __init__(self, capacity: int, lost: int) -> None:
        self.free = capacity - lost

    async def holds(self, stack: object, where: Where, slots: int) -> bool:
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
    assert await soak.unpromised(Where("nowhere:1"), capacity) == lost


def finished_soak(tally: Tally, *, used: int = 0, missing: int = 0) -> None:
    samples = [Sample(float(t), 80.0, 700.0, 10, 2) for t in range(60)]
    hostile = Hostile(Where("nowhere:1"), random.Random(0), [1])
    soak._finish(tally, hostile, samples, 60.0, pb.VerifierStatus(kv_used=used), missing)


def test_the_soak_fails_for_leaks_for_differing_outputs_and_for_errors(capsys: pytest.CaptureFixture[str]) -> None:
    finished_soak(Tally(gaps_ms=[1.0, 2.0, 3.0]))
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["leaked_slots"], last["rss_growth_mb"], last["p50_ms"]) == (0, 0.0, 2.0)
    failed = Tally()
    failed.add(Job(0), Outcome(error="Unavailable: gone"))
    for tally, leak in ((Tally(), {"used": 1}), (Tally(), {"missing": 1}), (Tally(differing=1), {}), (failed, {})):
        with pytest.raises(SystemExit):
            finished_soak(tally, **leak)


def ended(at: float, tokens: int, finish: str = "length") -> Ended:
    return Ended(at, Outcome(tokens=tokens, finish=finish))


def test_goodput_counts_what_has_finished_within_the_window() -> None:
    rate = Rate.of([ended(4.9, 50), ended(5.0, 60), ended(9.0, 40), ended(9.5, 7, ""), ended(10.0, 50)], 5.0, 10.0)
    assert (rate.tokens_per_s, rate.sessions_per_s) == (20.0, 0.4)


def outcomes(*, errors: Iterable[str] = ()) -> list[Outcome]:
    return [Outcome(tokens=9, finish="length"), *(Outcome(error=error, refused_s=[0.01]) for error in errors)]


def test_overload_fails_for_lost_goodput_for_dear_refusals_and_for_errors(capsys: pytest.CaptureFixture[str]) -> None:
    peak, cheap = Rate(100.0, 2.0), Price(0.5, 1.0, 500.0, overload.REFUSALS)
    overload._finish(cheap, 16, peak, Rate(81.0, 1.6), 9, outcomes(errors=["Overloaded: full"]))
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["goodput_share_of_peak"], last["shed"], last["refusal_p50_ms"]) == (0.81, 1, 10.0)
    for cost, rate, errors in (
        (cheap, Rate(79.0, 1.6), []),
        (Price(100.0, 1.0, 500.0, overload.REFUSALS), Rate(81.0, 1.6), []),
        (Price(0.5, 1.0, 500.0, overload.REFUSALS - 1), Rate(81.0, 1.6), []),
        (cheap, Rate(81.0, 1.6), ["Unavailable: gone"]),
    ):
        with pytest.raises(SystemExit):
            overload._finish(cost, 16, peak, rate, 9, outcomes(errors=errors))


@pytest.mark.parametrize(
    ("attack", "answer"),
    [
        (Hostile.id_gap, "INVALID_ARGUMENT"),
        (Hostile.same_siblings, "INVALID_ARGUMENT"),
        (Hostile.too_deep, "INVALID_ARGUMENT"),
        (Hostile.base_of_the_future, "INVALID_ARGUMENT"),
    ],
)
async def test_an_attack_gets_through_to_the_protocol_and_is_refused_there(attack: Attack, answer: str) -> None:
    script = Script(target, vocabulary_size=VOCABULARY, limits=SessionLimits(depth=32), ping_s=60.0)
    async with FakeVerifier(script) as verifier:
        hostile = Hostile(Where(verifier.address), random.Random(0), [1, 2, 3])
        assert await hostile.one(attack) == answer
        assert verifier.opens, "the attack never got as far as a session"


def test_a_percentile_is_a_value_that_was_seen() -> None:
    assert percentile([], 0.5) is None
    assert percentile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert percentile(list(range(100)), 0.99) == 99


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
