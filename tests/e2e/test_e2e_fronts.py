"""Test a verifier whose port several front processes share, over one engine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import time
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from system import alive, until

from benchmarks.support import proc
from coordinator.cluster import Child, Cluster
from edge_agent import AsyncClient, EdgeSettings
from outrider.wire.channels import channel
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

FRONTS = 3
CLIENTS = 8
"""Each has connections of its own: that all come to one front has a probability of 3 to the power of -7."""
PROMPT = "def fibonacci(n):\n"
OPTIONS = {"max_tokens": 300, "temperature": 0.8, "seed": 11, "ignore_eos": True}


class Fronts:
    """A cluster with one verifier that has several fronts."""

    def __init__(self, cluster: Cluster, verifier: Child, metrics: str, folder: Path) -> None:
        self.cluster = cluster
        self.verifier = verifier
        self._metrics = metrics
        self._folder = folder

    @property
    def further(self) -> list[int]:
        """Return the process ids of the further fronts."""
        return [pid for pid in proc.family(self.verifier.pid) if b"further_process" in command_line(pid)]

    def client(self) -> AsyncClient:
        return AsyncClient(
            coordinator=self.cluster.address,
            draft=None,
            timeout=None,
            settings=EdgeSettings(cache_dir=self._folder / "cache"),
        )

    async def texts(self, count: int) -> list[str]:
        """Return what so many clients get for the same request at once."""
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(self.client()) for _ in range(count)]
            return [done.text for done in await asyncio.gather(*(one.generate(PROMPT, **OPTIONS) for one in clients))]

    async def metric(self, name: str) -> float:
        def read() -> str:
            return urllib.request.urlopen(f"http://{self._metrics}/metrics").read().decode()

        lines = (await asyncio.to_thread(read)).splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0].partition(" ")[0] == name)

    async def status(self) -> pb.StatusResponse:
        async with channel(self.cluster.address) as link:
            return await coordinator_pb2_grpc.AdminStub(link).Status(pb.StatusRequest())

    async def until_live(self, count: int) -> None:
        give_up = time.monotonic() + 20
        while (live := [one.telemetry.live_sessions for one in (await self.status()).verifiers]) != [count]:
            assert time.monotonic() < give_up, live
            await asyncio.sleep(0.1)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port: int = taken.getsockname()[1]
    return port


def command_line(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def fronts(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Fronts]:
    target, draft = pair
    folder = tmp_path_factory.mktemp("fronts")
    async with Cluster(logs=folder) as cluster:
        await cluster.start_coordinator("--listen", "127.0.0.1:0", "--state-dir", str(folder / "state"))
        metrics = f"127.0.0.1:{free_port()}"
        verifier = await cluster.start_verifier(
            *("--model", str(target), "--draft", str(draft), "--threads", "1", "--max-sessions", str(CLIENTS)),
            *("--front-processes", str(FRONTS), "--metrics", metrics),
        )
        yield Fronts(cluster, verifier, metrics, folder)


async def test_sessions_of_all_fronts_get_the_same_tokens_and_count_together(fronts: Fronts) -> None:
    assert len(fronts.further) == FRONTS - 1
    texts = await fronts.texts(CLIENTS)
    assert len({*texts}) == 1 and len(texts[0]) > 50
    await fronts.until_live(0)
    await asyncio.sleep(1.0)  # twice the time in which fronts tell what they count
    assert await fronts.metric("outrider_streams_ended_total") == CLIENTS
    assert await fronts.metric("outrider_streams_opened_total") == CLIENTS
    assert await fronts.metric("outrider_rtt_seconds_count") >= CLIENTS


async def test_sessions_of_all_fronts_are_reported(fronts: Fronts) -> None:
    async with contextlib.AsyncExitStack() as stack:
        clients = [await stack.enter_async_context(fronts.client()) for _ in range(CLIENTS)]
        streams = [await one.stream(PROMPT, **(OPTIONS | {"max_tokens": 1_000})) for one in clients]
        chunks = [aiter(await stack.enter_async_context(contextlib.aclosing(stream))) for stream in streams]
        for one in chunks:
            await anext(one)
        await fronts.until_live(CLIENTS)
    await fronts.until_live(0)


async def test_fronts_that_are_killed_are_started_again_and_their_sessions_go_on(fronts: Fronts) -> None:
    (expected,) = await fronts.texts(1)
    killed, resumed = fronts.further, await fronts.metric("outrider_streams_resumed_total")
    generating = asyncio.create_task(fronts.texts(CLIENTS))
    await fronts.until_live(CLIENTS)
    for pid in killed:
        os.kill(pid, signal.SIGKILL)
    assert await generating == [expected] * CLIENTS
    await until(lambda: len(fronts.further) == FRONTS - 1 and not {*killed} & {*fronts.further})
    await asyncio.sleep(1.0)
    assert await fronts.metric("outrider_streams_resumed_total") > resumed
    await fronts.until_live(0)
    assert await fronts.texts(CLIENTS) == [expected] * CLIENTS


async def test_all_processes_end_with_the_verifier(fronts: Fronts) -> None:
    family = proc.family(fronts.verifier.pid)
    assert len(family) >= FRONTS + 1
    fronts.verifier.signal_group(signal.SIGTERM)
    assert await fronts.verifier.wait() == 0
    await until(lambda: not any(alive(pid) for pid in family))
