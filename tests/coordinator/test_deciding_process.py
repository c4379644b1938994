"""Test that a process of its own decides as this one would, and that its end costs one decision alone."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from peers import until

from coordinator.api import deciding_process
from coordinator.api.counters import WindowCounters
from coordinator.api.deciding_process import Decided, Decider
from coordinator.records import Prior, Report, Window, WindowBounds, WindowDecision, WorkloadKey
from coordinator.store.redis_codec import decisions_from_json, decisions_to_json, report_to_json
from coordinator.window import report_adapter
from outrider.core.acceptance.history import HIT, MISS, SIBLING
from outrider.core.errors import Unavailable
from outrider.core.protocol.messages import SessionLimits
from outrider.core.telemetry import SessionTelemetry, VerifierTelemetry
from outrider.wire.codecs import directive_from_proto
from outrider.wire.telemetry import session_telemetry_to_proto, verifier_telemetry_to_proto
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import telemetry_pb2

LIMITS = SessionLimits()
VERIFIER = VerifierTelemetry(step_ms=30.0, step_cost_ms={1: 20.0, 16: 22.0, 64: 30.0}, timing_ms={"between": 1.0})
PRIOR = Prior(bytes([HIT, HIT, MISS, SIBLING]) * 20, 7.5, 1.5)


def sessions(count: int) -> tuple[SessionTelemetry, ...]:
    return tuple(
        SessionTelemetry(
            f"s{i}",
            epoch=5,
            rtt_ms=5.0 + 10.0 * i,
            acceptance_history=(bytes([HIT] * (i + 1)) + bytes([MISS])) * (0 if i == 3 else 20),
            draft_ms=3.0,
            nodes_per_level=1.5,
        )
        for i in range(count)
    )


def report(count: int = 8) -> Report:
    bounds = {"s1": WindowBounds(Window(3, 9)), "s2": WindowBounds(Window(2, 6, 0.0, 1.5), pinned=True)}
    told = sessions(count)
    new = {one.session_id: WorkloadKey("acme", "draft", "chat", "w") for one in told}
    message = pb.ReportRequest(
        verifier=verifier_telemetry_to_proto(VERIFIER), sessions=map(session_telemetry_to_proto, told)
    )
    return Report(message.SerializeToString(), count, new, bounds, 1_000.5)


def here(before: dict[str, WindowDecision], priors: dict[str, Prior]) -> tuple[WindowDecision, ...]:
    verifier, told = VERIFIER.with_totals_of(sessions(8)), sessions(8)
    return tuple(report_adapter.decide(verifier, told, before, report().bounds, LIMITS, priors).values())


def decided(made: Decided) -> tuple[WindowDecision, ...]:
    """Return the decisions, whose directives, counts and date are those that they must have."""
    decisions, windows, cpu_s = made
    found = decisions_from_json("", decisions.written)
    sent = pb.ReportResponse.FromString(decisions.directives)
    expected = [(one.session_id, one.epoch, report_adapter.directive(one, LIMITS)) for one in found]
    assert [(one.session_id, one.epoch, directive_from_proto(one.directive)) for one in sent.directives] == expected
    assert sent == pb.ReportResponse(directives=sent.directives)
    assert windows.k.counts == WindowCounters.of(found).k.counts
    assert windows.speedup.sum == pytest.approx(sum(one.speedup for one in found))
    assert decisions.reported_unix == 1_000.5
    assert cpu_s > 0.0
    return found


@pytest.fixture
async def process(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Decider]:
    monkeypatch.setattr(deciding_process, "IN_PROCESS_FROM", 0)
    process = Decider(LIMITS)
    yield process
    await process.close()


async def test_it_decides_as_this_process_would(process: Decider) -> None:
    before: dict[str, WindowDecision] = {}
    priors = {"s3": PRIOR, "s0": PRIOR}
    for _ in range(2):
        written = decisions_to_json(before.values())
        decisions = decided(await process.decide(report(), written, priors))
        assert decisions == decided(deciding_process.decide(report(), written, priors, LIMITS)) == here(before, priors)
        before = {one.session_id: one for one in decisions}
    assert {one.window.k for one in decisions} >= {0, 2}
    assert before["s3"].reason.startswith("by its class's prior")


async def test_calls_take_turns(process: Decider) -> None:
    calls = [process.decide(report(count), "[]", {}) for count in (8, 1, 5)]
    assert [len(decided(made)) for made in await asyncio.gather(*calls)] == [7, 1, 4]  # of s3 nothing is known


async def test_a_report_that_is_damaged_is_refused_and_the_next_one_is_decided_about(process: Decider) -> None:
    with pytest.raises(Unavailable, match="has failed: DecodeError"):
        await process.decide(replace(report(), message=b"["), "[]", {})
    assert decided(await process.decide(report(), "[]", {}))


async def test_a_process_that_was_killed_costs_one_decision(process: Decider) -> None:
    await process.decide(report(), "[]", {})
    assert process._child is not None
    os.kill(process._child.pid, signal.SIGKILL)
    with pytest.raises(Unavailable, match="the process that decides has failed"):
        await process.decide(report(), "[]", {})
    assert decided(await process.decide(report(), "[]", {}))


async def test_a_process_that_hangs_is_replaced(process: Decider, monkeypatch: pytest.MonkeyPatch) -> None:
    await process.decide(report(), "[]", {})
    assert process._child is not None
    hung = process._child.pid
    os.kill(hung, signal.SIGSTOP)
    monkeypatch.setattr(deciding_process, "DECIDE_S", 0.2)
    with pytest.raises(Unavailable, match="TimeoutError"):
        await process.decide(report(), "[]", {})
    monkeypatch.undo()
    monkeypatch.setattr(deciding_process, "IN_PROCESS_FROM", 0)
    assert decided(await process.decide(report(), "[]", {}))
    assert process._child is not None and process._child.pid != hung


async def test_an_answer_that_is_not_waited_for_is_nobody_elses(process: Decider) -> None:
    given_up = asyncio.create_task(process.decide(report(), "[]", {}))
    await asyncio.sleep(0.05)
    given_up.cancel()
    assert len(decided(await process.decide(report(1), "[]", {}))) == 1


async def test_where_no_process_can_be_started_this_one_decides_and_says_so(
    process: Decider, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(deciding_process, "tied_to_this_process", lambda: ["/no/such/program"])
    assert decided(await process.decide(report(), "[]", {})) == here({}, {})
    assert "no process can be started to decide, so this one does" in caplog.text


async def test_a_process_that_was_closed_starts_no_more(process: Decider) -> None:
    await process.decide(report(), "[]", {})
    await process.close()
    with pytest.raises(Unavailable, match="this coordinator ends"):
        await process.decide(report(), "[]", {})
    assert process._child is None


def test_it_ends_with_its_input() -> None:
    request = json.dumps({"report": report_to_json(report()), "before": "[]", "priors": [], "prior_of": {}}).encode()
    answers = io.BytesIO()
    deciding_process.serve(io.BytesIO(len(request).to_bytes(8, "little") + request), answers, LIMITS)
    written = answers.getvalue()
    assert len(json.loads(json.loads(written[8:])["written"])) == len(here({}, {}))


async def test_a_coordinator_has_it_decide_about_many_sessions_alone(start, monkeypatch):
    asked = []
    decide = Decider._decide_elsewhere

    async def noted(process, *call):
        found = await decide(process, *call)
        asked.append({one.session_id for one in decisions_from_json("", found[0].written)})
        return found

    monkeypatch.setattr(Decider, "_decide_elsewhere", noted)
    monkeypatch.setattr(deciding_process, "IN_PROCESS_FROM", 3)
    coordinator = await start(report_interval_ms=10_000, lease_ms=60_000)  # a report waits for what is decided from it
    await coordinator.join("v1")
    opened = [await coordinator.open() for _ in range(3)]
    told = [
        telemetry_pb2.SessionTelemetry(
            session_id=one.session_id, epoch=1, rtt_ms=20.0, acceptance_history=bytes([HIT] * 40), draft_ms=3.0
        )
        for one in opened
    ]

    async def told_of(some) -> bool:
        answer = await coordinator.report("v1", some, step_ms=50.0, step_cost_ms={1: 40.0, 8: 45.0})
        return {one.session_id for one in answer.directives} == {one.session_id for one in some}

    assert await told_of(told[:2])
    await until(lambda: told_of(told))  # a report waits no longer than a second, and the process may start for longer
    assert asked
    assert all(one == {session.session_id for session in opened} for one in asked)


async def test_what_a_coordinator_decides_by_itself_it_decides_one_by_one_with_rests(start, monkeypatch):
    spans, decide = [], deciding_process.decide

    def slow(*given):
        begun = time.monotonic()
        time.sleep(0.05)
        spans.append((begun, time.monotonic()))
        return decide(*given)

    monkeypatch.setattr(deciding_process, "decide", slow)
    coordinator = await start(report_interval_ms=10_000, lease_ms=60_000)
    for name in ("v1", "v2", "v3"):
        await coordinator.join(name)
    await asyncio.gather(*(coordinator.report(name) for name in ("v1", "v2", "v3")))
    rests = [later[0] - earlier[1] for earlier, later in itertools.pairwise(spans)]
    assert len(rests) == 2
    assert min(rests) >= 0.045


async def test_the_time_of_a_decision_leaves_out_those_before_it(process: Decider, monkeypatch) -> None:
    slow = "import json, os, sys, time\nwhile head := sys.stdin.buffer.read(8):\n" + (
        "    sys.stdin.buffer.read(int.from_bytes(head, 'little')); time.sleep(0.3)\n"
        "    answer = json.dumps({'error': 'none was made'}).encode()\n"
        "    sys.stdout.buffer.write(len(answer).to_bytes(8, 'little') + answer); sys.stdout.buffer.flush()\n"
    )
    monkeypatch.setattr(deciding_process, "tied_to_this_process", lambda: [sys.executable, "-c", slow])
    monkeypatch.setattr(deciding_process, "DECIDE_S", 0.6)
    calls = (process.decide(report(), "[]", {}) for _ in range(4))
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert [str(one) for one in ended] == ["the process that decides has failed: none was made"] * 4


async def test_what_cannot_be_read_ends_the_process(process: Decider, monkeypatch) -> None:
    mad = "import sys\nwhile True: sys.stdout.buffer.write((8).to_bytes(8, 'little') + b'nonsense' * 100_000)"
    monkeypatch.setattr(deciding_process, "tied_to_this_process", lambda: [sys.executable, "-c", mad])
    with pytest.raises(Unavailable, match="has failed"):
        await asyncio.wait_for(process.decide(report(), "[]", {}), 5.0)
    monkeypatch.undo()
    monkeypatch.setattr(deciding_process, "IN_PROCESS_FROM", 0)
    assert decided(await process.decide(report(), "[]", {}))
