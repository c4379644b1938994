"""Test the parts of benchmarks.chaos: its schedule, broken links and clock, and that each of its checks can fail."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis.asyncio as redis_client
from tcp_server import serving

from benchmarks.chaos import cluster as chaos_cluster
from benchmarks.chaos import faults
from benchmarks.chaos.faults import KINDS
from benchmarks.chaos.findings import Findings, InjectedFault, criteria
from benchmarks.chaos.invariants import HELD_S, SLOTS_S, Invariants, places_in
from benchmarks.chaos.journal import Journal
from benchmarks.chaos.links import Balancer, FaultyProxy
from benchmarks.chaos.schedule import schedule
from benchmarks.chaos.sessions import TIMEOUT_S, SessionOutcome, SessionRequest
from benchmarks.support.network_link import Link
from coordinator.store import keys
from outrider.wire.v1.coordinator_pb2 import StatusResponse
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry, VerifierTelemetry

RATES = [kind.rate for kind in KINDS.values()]
WANTED = (5, 6, 7, 8)
REQUEST = SessionRequest("a", (1,), {"temperature": 0.0, "seed": 0})


def test_a_seed_gives_the_same_faults_again_and_another_one_others() -> None:
    assert schedule(RATES, 300, 1) == schedule(RATES, 300, 1) != schedule(RATES, 300, 2)


def test_a_schedule_has_every_kind_and_lengths_within_their_bounds() -> None:
    plan = schedule(RATES, 300, 1)
    assert len(plan) == 300
    assert {fault.kind for fault in plan} == set(KINDS)
    for fault in plan:
        low, high = KINDS[fault.kind].hold_s
        assert low <= fault.hold_s <= high


def test_a_short_schedule_has_no_kind_twice() -> None:
    assert len({fault.kind for fault in schedule(RATES, 20, 1)}) == 20


# --- findings


def outcome(tokens: tuple[int, ...] = WANTED, error: str = "", **changes: Any) -> SessionOutcome:
    when = {"request": REQUEST, "device": 0, "began": 10.0, "ended": 12.0}
    return SessionOutcome(**when | changes, tokens=tokens, error=error)


def judged(*outcomes: SessionOutcome, faults: tuple[InjectedFault, ...] = (), tie: bool = False) -> Findings:
    findings = Findings({"a": WANTED}, faults, lambda _: tie)
    for one in outcomes:
        findings.add(one)
    return findings


def fault(kind: str = "reset", began: float = 10.0, ended: float = 11.0, **changes: Any) -> InjectedFault:
    return InjectedFault(kind, "what", began, ended, **changes)


@pytest.mark.parametrize(
    ("ended", "counted"),
    [
        (outcome(), "equal"),
        (outcome((5, 6, 9, 8)), "differing"),
        (outcome((5, 6)), "differing"),
        (outcome((5, 9), "Unavailable"), "differing"),
        (outcome((5, 6), "Unavailable"), "lost"),
        (outcome((5, 6), "TypeError", typed=False), "untyped"),
        (outcome((), "stuck"), "stuck"),
        (outcome((), "killed"), "killed"),
    ],
)
def test_a_session_is_counted_by_its_tokens_and_its_error(ended: SessionOutcome, counted: str) -> None:
    assert judged(ended).counts[counted] == 1


def test_a_difference_by_rounding_alone_is_a_tie() -> None:
    found = judged(outcome((5, 6, 9, 8)), tie=True)
    assert (found.counts["ties"], found.counts["differing"]) == (1, 0)


def test_only_a_session_without_a_token_is_refused_while_the_control_plane_is_gone() -> None:
    gone = fault("redis away", refuses=True)
    found = judged(outcome((), "Unavailable"), outcome((5,), "Unavailable"), faults=(gone,))
    assert (found.counts["refused"], found.counts["lost"]) == (1, 1)
    assert judged(outcome((), "Unavailable"), faults=(fault(refuses=True, device=1),)).counts["lost"] == 1


def test_a_session_is_lost_unless_no_verifier_comes_back_within_its_callers_time() -> None:
    for ended, counted in ((10.0 + TIMEOUT_S, "out_of_reach"), (20.0, "lost")):
        away = fault("all verifiers killed", 11.0, ended, leaves_verifier=False)
        assert judged(outcome((5,), "Unavailable"), faults=(away,)).counts[counted] == 1


def test_a_long_pause_is_explained_by_the_fault_that_was_in_force_for_most_of_it() -> None:
    faults = (fault("blackhole", 10.0, 17.0), fault("reset", 16.0, 16.1), fault("far", 10.0, 18.0, device=1))
    found = judged(outcome(waits=((10.0, 16.5), (60.0, 61.0))), faults=faults)
    (line,) = found.long_pauses()
    assert line.startswith("pause of 6.5 s")
    assert "blackhole" in line
    assert "a verifier was left" in line
    assert found.worst_pause_s == 6.5
    assert found.by_kind() == {"blackhole": 6.5, "no fault": 1.0}


def test_a_pause_that_no_fault_explains_says_so() -> None:
    assert "no fault explains it" in next(judged(outcome(waits=((90.0, 99.0),)), faults=(fault(),)).long_pauses())


def test_every_promise_fails_the_run() -> None:
    kept = dict.fromkeys(
        ("differing", "untyped", "lost", "stuck", "leaked_places", "leaked_slots", "violations", "error_lines"), 0
    ) | {"pauses_unexplained": 0, "looks": 1, "faults": 300}
    assert all(criterion.met for criterion in criteria(kept, 29.0))
    for promise in kept:
        broken = {promise: 1 - kept[promise]}  # to have looked at nothing is one, too
        assert sum(not criterion.met for criterion in criteria(kept | broken, 29.0)) == 1


# --- what is checked meanwhile


def status(*owned: tuple[str, int, str], slots: int = 0, live: int = 0) -> StatusResponse:
    """Return a coordinator's answer. owned: session, epoch, verifier. slots, live: of verifier v."""
    answer = StatusResponse()
    for session, epoch, verifier in owned:
        answer.sessions.add(verifier_id=verifier, reported=True).telemetry.MergeFrom(
            SessionTelemetry(session_id=session, epoch=epoch)
        )
    answer.verifiers.add(verifier_id="v").telemetry.MergeFrom(VerifierTelemetry(kv_used=slots, live_sessions=live))
    return answer


def ended_stream(session: str, epoch: int) -> str:
    return json.dumps({"level": "INFO", "message": f"stream of epoch {epoch} ended: length", "session": session})


def test_a_second_owner_is_found_in_what_coordinators_say_and_only_within_one_epoch() -> None:
    seen = Invariants(10)
    for owned in (("0123456789", 1, "a"), ("0123456789", 1, "a"), ("0123456789", 2, "b"), ("1123456789", 1, "b")):
        seen.see(status(owned), 0.0)
    assert not seen.violations
    seen.see(status(("0123456789", 2, "a")), 0.0)
    (violation,) = seen.violations.values()
    assert violation == "session 01234567, epoch 2: owned by ['a', 'b']"


def test_a_second_owner_is_found_in_the_verifiers_logs() -> None:
    seen = Invariants(10)
    journal = Journal(on_line=seen.read)
    for verifier, epoch in (("verifier-1", 1), ("verifier-2", 2), ("verifier-1", 3)):
        journal.add(verifier, ended_stream("01234567", epoch))
    journal.add("verifier-2", "no line of ours: stream of epoch 3 ended")
    assert not seen.violations
    seen.see(status(("0123456789", 3, "verifier-2")), 0.0)
    assert "epoch 3: owned by ['verifier-1', 'verifier-2']" in "".join(seen.violations.values())


def test_a_place_that_outlives_its_session_is_found_once_it_has_done_so_for_long() -> None:
    for left_at, found in ((HELD_S - 1, 0), (HELD_S + 1, 1)):
        seen = Invariants(10)
        for now in (0.0, HELD_S / 2, left_at):
            seen.see_places({"placements:v": ["s", "t"], "tenant-places:x": ["s"]}, {"s", "u"}, now)
        assert len(seen.violations) == found
    assert "place of s: holds a place in tenant-places:x, and has ended, for 61 s" in seen.violations.values()


def test_a_place_that_came_back_meanwhile_is_none_that_was_kept() -> None:
    seen = Invariants(10)
    for now, held in ((0.0, ["s"]), (HELD_S / 2, []), (HELD_S + 1, ["s"])):
        seen.see_places({"placements:v": held}, {"s"}, now)
    assert not seen.violations


def test_a_place_of_a_session_of_which_nothing_is_known_is_found_once_no_session_takes_so_long() -> None:
    seen = Invariants(10)
    for now in (0.0, TIMEOUT_S + HELD_S + 1):
        seen.see_places({"placements:v": ["s"]}, (), now)
    assert "longer than a session takes" in "".join(seen.violations.values())


def test_slots_that_no_session_needs_are_found_once_they_are_kept_for_long() -> None:
    for slots, live, found in ((20, 2, 0), (21, 2, 1), (1, 0, 1), (0, 0, 0)):
        seen = Invariants(10)
        for now in (0.0, SLOTS_S + 1):
            seen.see(status(slots=slots, live=live), now)
        assert len(seen.violations) == found
    seen = Invariants(10)
    for now, slots in ((0.0, 1), (SLOTS_S, 0), (SLOTS_S + 1, 1)):
        seen.see(status(slots=slots), now)
    assert not seen.violations


@pytest.mark.parametrize(("places", "slots", "found"), [(0, 0, 0), (1, 0, 1), (0, 9, 1)])
def test_what_is_left_at_rest_is_a_violation(places: int, slots: int, found: int) -> None:
    seen = Invariants(10)
    seen.rested("after fault 25", places, slots, 60.0)
    assert len(seen.violations) == found


async def test_places_are_read_from_redis_and_those_whose_time_is_over_are_none(tmp_path: Path) -> None:
    server = chaos_cluster.RedisServer(*chaos_cluster.free_ports(1), tmp_path, Journal())
    await server.start()
    try:
        async with redis_client.Redis.from_url(f"redis://{server.address}") as store:
            now_ms = (await store.time())[0] * 1_000
            await store.zadd(keys.placements("w", "v"), {"live": now_ms + 60_000, "over": now_ms - 60_000})
            await store.zadd(keys.tenant_places("w", "acme"), {"live": now_ms + 60_000})
        held = await places_in(server.address)
    finally:
        await server.stop()
    assert held == {keys.placements("w", "v"): ["live"], keys.tenant_places("w", "acme"): ["live"]}


def test_the_journal_counts_errors_by_their_text_and_leaves_grpcs_own_apart(tmp_path: Path) -> None:
    journal = Journal(tmp_path)

    def line(level: str, message: str) -> str:
        return json.dumps({"level": level, "logger": "x", "message": message})

    for name, text in (
        ("verifier-1", line("ERROR", "session 0123456789abcdef failed")),
        ("verifier-2", line("ERROR", "session ffff456789abcdef failed")),
        ("verifier-2", line("WARNING", "report 7 late")),
        ("verifier-2", line("INFO", "Error: all is well")),
        ("verifier-2", "E1125 21:06:09.120531   16310 hpack_parser.cc:1048] Error parsing"),
        ("device-1", "Traceback (most recent call last):"),
    ):
        journal.add(name, text)
    assert sorted(journal.errors.values()) == [1, 2]
    assert list(journal.warnings.values()) == list(journal.grpc.values()) == [1]
    assert len((tmp_path / "verifier-2.log").read_text().splitlines()) == 4


async def test_a_replica_that_is_promoted_has_what_its_primary_had_and_the_former_one_follows_it(
    tmp_path: Path,
) -> None:
    ports = chaos_cluster.free_ports(2)
    first, second = (
        chaos_cluster.RedisServer(port, tmp_path, Journal(), name) for port, name in zip(ports, "ab", strict=True)
    )
    second.primary = first
    try:
        await first.start()
        await second.start()
        assert not await first.has_all()  # it is no replica
        async with asyncio.timeout(20):
            while not await second.has_all():  # noqa: ASYNC110  # another process copies
                await asyncio.sleep(0.05)
        assert await first.say("SET key value")
        async with redis_client.Redis.from_url(f"redis://{first.address}") as store:
            assert await store.wait(1, 5_000) == 1
        await first.kill()
        await second.promote()
        first.primary = second
        await first.start()
        async with redis_client.Redis.from_url(f"redis://{second.address}") as store:
            assert await store.get("key") == b"value"
            assert (await store.info("replication"))["role"] == "master"
        async with redis_client.Redis.from_url(f"redis://{first.address}") as store:
            assert (await store.info("replication"))["role"] == "slave"
    finally:
        await first.stop()
        await second.stop()


# --- links and clocks


@contextlib.asynccontextmanager
async def echo(answer: bytes = b"") -> AsyncIterator[str]:
    """Run a server that sends back what it gets, or `answer` for each piece of it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            while data := await reader.read(4096):
                writer.write(answer or data)
                await writer.drain()

    async with serving(serve) as address:
        yield address


@contextlib.asynccontextmanager
async def line_through(proxy: FaultyProxy) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with proxy:
        host, port = proxy.address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        with contextlib.closing(writer):
            yield reader, writer


async def test_a_flip_that_waits_in_vain_for_a_chunk_has_struck_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "TAMPER_S", 0.05)
    link = FaultyProxy("127.0.0.1:1", link=Link())
    device = SimpleNamespace(name="device", number=1, links={"v": link})
    verifiers = [SimpleNamespace(name="v", tls=False)]
    bed: Any = SimpleNamespace(devices=[device], cluster=SimpleNamespace(verifiers=verifiers), draw=random.Random(1))
    async with faults.bytes_broken("flip", up=True, of=functools.partial(faults._link, tls=False))(bed) as struck:
        assert struck.missed


@pytest.mark.parametrize("up", [True, False])
async def test_a_flip_changes_one_bit_of_one_chunk(up: bool) -> None:
    sent = bytes(100)
    async with echo() as target:
        proxy = FaultyProxy(target, link=Link(), seed=3)
        async with line_through(proxy) as (reader, writer):
            proxy.flip(up=up)
            got = []
            for _ in range(2):
                writer.write(sent)
                got.append(await asyncio.wait_for(reader.readexactly(100), 5))
    assert sum(byte.bit_count() for byte in got[0]) == 1
    assert got[1] == sent
    assert proxy.tampered == 1


async def test_lost_bytes_are_missing_once() -> None:
    async with echo() as target:
        proxy = FaultyProxy(target, link=Link(), seed=3)
        async with line_through(proxy) as (reader, writer):
            proxy.lose(up=True)
            writer.write(bytes(range(200)))
            first = await asyncio.wait_for(reader.read(4096), 5)
            writer.write(bytes(200))
            second = await asyncio.wait_for(reader.readexactly(200), 5)
    assert 200 - 64 <= len(first) < 200
    assert second == bytes(200)


async def test_a_swallowed_direction_loses_everything_while_the_other_goes_on_until_a_reset() -> None:
    async with echo(b"heard") as target:
        proxy = FaultyProxy(target, link=Link())
        async with line_through(proxy) as (reader, writer):
            proxy.swallow(up=False)
            writer.write(b"one")
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(10), 0.3)
            assert proxy.bytes_up == 3
            proxy.spare()
            with contextlib.suppress(ConnectionResetError):
                assert await asyncio.wait_for(reader.read(10), 5) == b""


async def test_a_balancer_connects_to_healthy_servers_and_leaves_those_that_are_not() -> None:
    async with echo(b"a") as first, echo(b"b") as second:
        healthy = {second}
        balancer = Balancer([first, second], healthy, link=Link())
        async with line_through(balancer) as (reader, writer):
            writer.write(b"?")
            assert await asyncio.wait_for(reader.read(1), 5) == b"b"
            healthy.clear()
            balancer.leave(first)
            writer.write(b"?")
            assert await asyncio.wait_for(reader.read(1), 5) == b"b"
            balancer.leave(second)
            assert await asyncio.wait_for(reader.read(1), 5) == b""


def test_a_process_reads_the_clock_that_its_file_says(tmp_path: Path) -> None:
    file = tmp_path / "clock"
    file.write_text("3600")
    environment = {**os.environ, "PYTHONPATH": str(chaos_cluster.CLOCK), "CHAOS_CLOCK": str(file)}
    code = "import time; print(time.time(), time.monotonic())"
    for offset, text in ((3600.0, "3600"), (-3600.0, "-3600"), (0.0, ""), (0.0, "0")):
        file.write_text(text)
        output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout
        wall, monotonic = map(float, output.split())
        assert wall - time.time() == pytest.approx(offset, abs=60)
        assert monotonic == pytest.approx(time.monotonic(), abs=60)
