"""Test the parts of benchmarks.chaos: its schedule, broken links and clock, and that each of its checks can fail."""

from __future__ import annotations

import asyncio
import contextlib
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

from benchmarks.chaos import cluster as chaos_cluster
from benchmarks.chaos import faults
from benchmarks.chaos.__main__ import Ownership
from benchmarks.chaos.faults import KINDS
from benchmarks.chaos.findings import Findings, InjectedFault, criteria
from benchmarks.chaos.journal import Journal
from benchmarks.chaos.links import Balancer, FaultyProxy
from benchmarks.chaos.schedule import schedule
from benchmarks.chaos.sessions import TIMEOUT_S, SessionOutcome, SessionRequest
from benchmarks.support.network_link import Link

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
        ("differing", "untyped", "lost", "stuck", "leaked_places", "leaked_slots", "two_owners", "error_lines"), 0
    )
    assert all(criterion.met for criterion in criteria(kept, 29.0))
    for promise in kept:
        assert sum(not criterion.met for criterion in criteria(kept | {promise: 1}, 29.0)) == 1


def test_a_session_has_two_owners_only_within_one_epoch() -> None:
    ownership = Ownership()
    for epoch, verifier in ((1, "a"), (1, "a"), (2, "b")):
        ownership.owners["s", epoch].add(verifier)
    assert ownership.shared == []
    ownership.owners["s", 2].add("a")
    assert len(ownership.shared) == 1


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


# --- links and clocks


@contextlib.asynccontextmanager
async def echo(answer: bytes = b"") -> AsyncIterator[str]:
    """Run a server that sends back what it gets, or `answer` for each piece of it."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(ConnectionError):
            while data := await reader.read(4096):
                writer.write(answer or data)
                await writer.drain()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"


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
    async with faults.bytes_broken("flip", up=True, tls=False)(bed) as struck:
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
