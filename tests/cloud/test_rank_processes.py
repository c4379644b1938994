"""Test a verifier whose target two processes share: it serves, it ends as a whole, and none of it outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest
from demanded import demand
from scripted_engine import Stream, until
from test_engine_host import PROMPT, start, tokens_of
from tiny_targets import Reference, save_tiny

from cloud_verifier.config import VerifierConfig
from cloud_verifier.engine_process.host import EngineHost
from outrider.core.errors import ModelRefused, Unavailable
from outrider.core.protocol.messages import Attach
from outrider.wire import channels, codecs
from outrider.wire.v1 import session_pb2_grpc

TOKENIZER = Path(__file__).parents[2] / "models" / "target" / "tokenizer.json"
START_S = 90.0


@pytest.fixture(autouse=True)
def needs_accelerate() -> None:
    demand("accelerate", "a model that transformers splits")


@contextlib.asynccontextmanager
async def verifier(
    directory: Path, *, loading: bool = False
) -> AsyncIterator[tuple[Process, str, list[psutil.Process]]]:
    """Yield (process, address, its ranks) of a verifier that listens, or has just begun to load."""
    options = ["--model", str(directory), "--tensor-parallel", "2", "--kv-slots", "256"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cloud_verifier.app", *options, stdout=PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    ranks: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        if loading:
            await until(lambda: len(psutil.Process(process.pid).children()) == 2, START_S)
            line = b""
        else:
            line = await asyncio.wait_for(process.stdout.readline(), START_S)
            assert line.startswith(b"listening on ")
        ranks = psutil.Process(process.pid).children()
        yield process, line.decode().rpartition(" ")[2].strip(), ranks
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        for rank in ranks:
            with contextlib.suppress(psutil.NoSuchProcess):
                rank.kill()
        await process.communicate()


def gone(ranks: list[psutil.Process]) -> bool:
    return not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)


def listening(processes: list[psutil.Process]) -> set[str]:
    """Return the addresses at which they can be reached."""
    found = [c for process in processes for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
    return {connection.laddr.ip for connection in found}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a tiny target with a tokenizer beside it."""
    made = save_tiny("llama", tmp_path_factory.mktemp("parallel") / "llama")
    shutil.copy(TOKENIZER, made)
    return made


async def test_two_ranks_serve_a_session_over_the_wire_and_end_together(
    directory: Path, reference: Callable[[str], Reference]
) -> None:
    async with verifier(directory) as (process, address, ranks), channels.channel(address) as channel:
        assert len(ranks) == 2
        assert listening(ranks) == {"127.0.0.1"}
        assert {rank.environ()["GLOO_SOCKET_IFNAME"] for rank in ranks} <= {"lo", "lo0"}
        stub = session_pb2_grpc.VerifierStub(channel)  # type: ignore[no-untyped-call]
        stream = Stream(stub.Session())
        attach = Attach(epoch=1, prompt=PROMPT, max_tokens=12, ignore_eos=True)
        await stream.send(open=codecs.open_to_proto(codecs.Open("s", attach)))
        opened = (await stream.read()).opened
        assert opened.epoch == 1
        tokens: list[int] = []
        while len(tokens) < 12:
            message = await stream.read()
            if message.WhichOneof("kind") == "commit":
                tokens += message.commit.token
        assert tokens == reference("llama").generate(list(PROMPT), 12, ignore_eos=True)
        stream.call.cancel()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 20) == 0
        await until(lambda: gone(ranks))


@pytest.mark.parametrize(("loading", "within_s"), [(True, 40.0), (False, 5.0)])
async def test_the_ranks_end_with_a_verifier_that_is_killed(directory: Path, loading: bool, within_s: float) -> None:
    async with verifier(directory, loading=loading) as (process, _, ranks):
        assert len(ranks) == 2
        process.kill()
        await until(lambda: gone(ranks), within_s)  # one that still imports torch hears of it afterwards
        assert gone(ranks)


async def test_a_rank_that_dies_while_nothing_is_computed_ends_the_engine_too(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = EngineHost(VerifierConfig(model=directory, kv_slots=256, tensor_parallel=2))
    try:
        ready = await host.start()
        assert ready.target.backend == "sdpa+tp2"
        inbox = host.register("s", 1)
        host.send(start())
        await tokens_of(inbox)
        psutil.Process(host.ranks._others[0].pid).kill()
        waiting = host.register("w", 1)
        with pytest.raises(Unavailable, match="engine process has ended"):
            await tokens_of(waiting)
        assert "rank 1 (exit status -9) of the engine has ended" in caplog.text
    finally:
        await host.stop()


async def test_a_rank_that_dies_within_a_session_ends_it_with_an_error_at_once(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    host = EngineHost(VerifierConfig(model=directory, kv_slots=256, tensor_parallel=2))
    try:
        await host.start()
        inbox = host.register("s", 1)
        psutil.Process(host.ranks._others[0].pid).kill()
        host.send(start(max_tokens=100))
        async with asyncio.timeout(3.0):
            with pytest.raises(Unavailable, match="engine process has ended"):
                await tokens_of(inbox)
        assert "the 2 ranks of the target are no longer in step" in caplog.text
    finally:
        await host.stop()


def children() -> set[psutil.Process]:
    """Return the children of this process, including those that other tests' pools have left."""
    return set(psutil.Process().children())


async def test_ranks_that_still_load_are_ended_at_once(directory: Path) -> None:
    others = children()
    host = EngineHost(VerifierConfig(model=directory, tensor_parallel=2))
    starting = asyncio.create_task(host.start())
    await until(lambda: len(children() - others) == 2)
    starting.cancel()
    await asyncio.wait({starting})
    async with asyncio.timeout(3.0):
        await host.stop()
    assert not children() - others


async def test_a_target_that_cannot_be_split_is_refused_with_the_reason(tmp_path: Path) -> None:
    others = children()
    host = EngineHost(VerifierConfig(model=save_tiny("gpt2", tmp_path), tensor_parallel=2))
    try:
        with pytest.raises(ModelRefused, match="no tensor-parallel plan"):
            await host.start()
    finally:
        await host.stop()
    assert not children() - others
