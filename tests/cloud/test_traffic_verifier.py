"""Test a real verifier with a tiny target, a coordinator that signs any ticket, and a device on the wire."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import paced_verifier
import pytest
from scripted_engine import Stream
from test_registration import Registry, serving
from tiny_targets import save_tiny

from cloud_verifier.traffic.passage import Passage
from cloud_verifier.traffic.segments import SegmentLog
from outrider.core.protocol.messages import Attach, SessionLimits
from outrider.wire import channels, codecs
from outrider.wire.ticket import Claims, Signer, target_from_proto, ticket_metadata
from outrider.wire.v1 import session_pb2, session_pb2_grpc

TOKENIZER = Path(__file__).parents[2] / "models" / "target" / "tokenizer.json"
START_S = 90.0
FLUSH_S = 1.0
PROMPT = (3, 1, 4, 1, 5)


@contextlib.asynccontextmanager
async def verifier(model: Path, traffic: Path, coordinator: str) -> AsyncIterator[tuple[Process, str]]:
    """Start a paced verifier that keeps a traffic log, and yield its process and address."""
    options = ["--model", str(model), "--coordinator", coordinator, "--traffic", str(traffic), "--verifier-id", "v1"]
    settings = {"TRAFFIC_FLUSH_S": str(FLUSH_S), "TRAFFIC_TOP": "4", "KV_SLOTS": "1024"}
    settings["SERVER_SOURCES"] = ""  # a step gives one token, so that no text is over before its test is
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        paced_verifier.NAME,
        *options,
        stdout=PIPE,
        env=os.environ
        | {"OMP_NUM_THREADS": "1"}
        | paced_verifier.environment(20.0)
        | {f"OUTRIDER_VERIFIER_{k}": v for k, v in settings.items()},
    )
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), START_S)).decode()
        assert line.startswith("listening on ")
        yield process, line.rpartition(" ")[2].strip()
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


class Device:
    """Open sessions with tickets of the test's choice."""

    def __init__(self, stub: Any, signer: Signer, target: session_pb2.TargetIdentity) -> None:
        self._stub = stub
        self._signer = signer
        self._target = target_from_proto(target)

    async def open(
        self,
        session_id: str,
        max_tokens: int,
        keep_s: float,
        received: tuple[int, ...] = (),
        *,
        keep_prompts: bool = False,
    ) -> Stream:
        ticket = self.ticket(session_id, keep_s, keep_prompts=keep_prompts)
        attach = Attach(epoch=1, prompt=PROMPT, tokens=received, max_tokens=max_tokens, ignore_eos=True)
        stream = Stream(self._stub.Session(metadata=ticket_metadata(ticket)))
        await stream.send(open=codecs.open_to_proto(codecs.Open(session_id, attach)))
        return stream

    def ticket(self, session_id: str, keep_s: float = 0.0, *, keep_prompts: bool = False) -> bytes:
        claims = Claims(
            session_id,
            "acme",
            "v1",
            1,
            99,
            time.time() + 60,
            SessionLimits(),
            self._target,
            draft_release="r1",
            traffic_class="code",
            keep_s=keep_s,
            keep_prompts=keep_prompts,
        )
        return self._signer.sign(claims)


class Reading:
    """Collect the messages of one stream."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.tokens: list[int] = []
        self.serials: list[int] = []

    async def message(self) -> None:
        message = await self.stream.read()
        self.tokens += message.commit.token
        if message.HasField("release"):
            self.serials.append(message.release.serial)

    async def confirm(self) -> None:
        """Confirm everything received: no verifier commits more than 64 tokens beyond it."""
        await self.stream.send(append=session_pb2.Append(first_id=1, base=len(self.tokens), idle=True))

    async def until(self, count: int) -> list[int]:
        """Return all tokens so far, once there are `count`."""
        while len(self.tokens) < count:
            await self.message()
        return self.tokens


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = save_tiny("llama", tmp_path_factory.mktemp("served") / "llama")
    shutil.copy(TOKENIZER, directory)
    return directory


@contextlib.asynccontextmanager
async def cluster(model: Path, traffic: Path) -> AsyncIterator[tuple[Registry, Process, Device]]:
    registry = Registry()
    signer = registry.trust(Signer.generate())
    async with (
        serving(registry) as coordinator,
        verifier(model, traffic, coordinator) as (process, address),
        channels.channel(address) as channel,
    ):
        stub = session_pb2_grpc.VerifierStub(channel)
        anybody = Device(stub, signer, session_pb2.TargetIdentity(name="t", weights_hash="w", tokenizer_hash="k"))
        metadata = ticket_metadata(anybody.ticket("describing"))
        described = await stub.Describe(session_pb2.DescribeRequest(), metadata=metadata)
        yield registry, process, Device(stub, signer, described.target)


def recorded(traffic: Path, session_id: str) -> list[Passage]:
    return [passage for passage in SegmentLog(str(traffic)).read() if passage.session_id == session_id]


def tokens_of(passages: list[Passage]) -> list[int]:
    assert all(one.end == other.start for one, other in pairwise(passages))
    return [token for passage in passages for token in passage.tokens.tolist()]


async def test_what_a_ticket_allows_is_recorded_and_nothing_else(model, tmp_path, reference):
    expected = reference("llama").generate(list(PROMPT), 60, ignore_eos=True)
    async with cluster(model, tmp_path / "log") as (registry, process, device):
        registry.release_serial = 7
        allowed = Reading(await device.open("allowed", 40, keep_s=3600.0))
        private = Reading(await device.open("private", 40, keep_s=0.0))
        resumed = Reading(
            await device.open("resumed", 60, keep_s=3600.0, received=tuple(expected[:45]), keep_prompts=True)
        )
        asking = Reading(await device.open("asking", 10, keep_s=3600.0, keep_prompts=True))
        await allowed.until(10)
        await allowed.stream.send(draft=session_pb2.DraftInUse(release="r2"))
        assert await allowed.until(40) == await private.until(40) == expected[:40]
        assert await resumed.until(15) == expected[45:]
        assert await asking.until(10) == expected[:10]
        assert allowed.serials == [7]
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 30) == 0

    passages = recorded(tmp_path / "log", "allowed")
    assert tokens_of(passages) == expected[:40]
    releases = [release for passage in passages for release in [passage.draft_release] * len(passage)]
    assert releases == sorted(releases)
    assert 10 <= releases.count("r1") < 40
    assert releases.count("r2") == 40 - releases.count("r1")
    for one in passages:
        assert (one.tenant, one.traffic_class, one.top) == ("acme", "code", 4)
        assert one.expires_unix == pytest.approx(one.time_unix + 3600.0, abs=2 * FLUSH_S)
        assert (one.tokens[:, None] == one.top_ids[:, :1]).all()  # greedy
    assert recorded(tmp_path / "log", "private") == []
    [tail, *more] = recorded(tmp_path / "log", "resumed")
    assert (tail.start, tokens_of([tail, *more])) == (45, expected[45:])
    assert [one.prompt.size for one in (*passages, tail, *more)] == [0] * (len(passages) + 1 + len(more))
    [head, *rest] = recorded(tmp_path / "log", "asking")
    assert (head.prompt.tolist(), tokens_of([head, *rest])) == (list(PROMPT), expected[:10])
    reports = [session for report in registry.reports for session in report.sessions]
    assert {session.draft_release for session in reports if session.session_id == "private"} == {"r1"}
    assert {session.traffic_class for session in reports} == {"code"}


async def test_a_kill_loses_no_more_than_one_flush_interval(model, tmp_path, reference):
    expected = reference("llama").generate(list(PROMPT), 240, ignore_eos=True)
    async with cluster(model, tmp_path / "log") as (_, process, device):
        reading = Reading(await device.open("s", 240, keep_s=3600.0))
        got: list[tuple[float, int]] = []
        began = time.monotonic()
        while time.monotonic() < began + 2.5 * FLUSH_S:
            await reading.message()
            await reading.confirm()
            got.append((time.monotonic(), len(reading.tokens)))
        process.send_signal(signal.SIGKILL)
        killed = time.monotonic()
        await process.wait()
    kept = tokens_of(recorded(tmp_path / "log", "s"))
    assert kept == expected[: len(kept)]
    old = max(count for at, count in got if at < killed - FLUSH_S - 0.5)  # half a second for the write
    assert old <= len(kept) < 240
