"""Test a verifier's life as a supervisor sees it: loading, ready, draining, gone."""

from __future__ import annotations

import asyncio
import contextlib
import operator
import signal
import socket
import sys
import time

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from system import DRAIN_S, QUICK, ROOT

from outrider.core.errors import Draining, OutriderError, Unavailable
from outrider.core.protocol.messages import Attach
from outrider.wire import codecs
from outrider.wire.channels import channel
from outrider.wire.status import error_from_rpc
from outrider.wire.v1 import session_pb2, session_pb2_grpc

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="session")]

PROMPT = "class Stack:\n    def __init__(self):\n"
OPTIONS = {"max_tokens": 900, "ignore_eos": True, "temperature": 0.8, "seed": 4}
EARLY = 30
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


def now() -> float:
    return time.clock_gettime(time.CLOCK_MONOTONIC)


async def test_a_session_that_outlasts_the_drain_is_handed_over_without_a_loss(hasty, device):
    await hasty.settled()
    whole = (await device.run(hasty.here, PROMPT, **OPTIONS))["tokens"]
    running = await device.begin(hasty.here, PROMPT, **OPTIONS)
    await running.until_tokens(EARLY)
    leaving = hasty.verifier_at(running.attaches[0])
    leaving.signal_group(signal.SIGTERM)
    begun = now()
    # The coordinator learns of it at once, and still reports the session that goes on.
    loads = operator.attrgetter("telemetry.draining", "telemetry.live_sessions")
    await hasty.until_status(lambda s: any(all(loads(v)) for v in s.verifiers), timeout_s=DRAIN_S)
    await running.until_attaches(2)
    resumed = running.times[-1]
    done = await running.done()
    assert done["tokens"] == whole
    assert done["attaches"] == 2  # straight to the standby, no second try at the one that leaves
    assert running.attaches[1] != leaving.address
    assert resumed - begun >= DRAIN_S
    gaps = [later - sooner for sooner, later in zip(running.times, running.times[1:], strict=False)]
    assert max(gaps) < 2.0
    assert await asyncio.wait_for(leaving.wait(), 10) == 0
    hasty.replace_in_background()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


class SingleVerifier:
    """Run one verifier process without a coordinator, from its first moment on."""

    def __init__(self, process: asyncio.subprocess.Process, link) -> None:
        self.process = process
        self.link = link

    async def health(self) -> int | None:
        try:
            stub = health_pb2_grpc.HealthStub(self.link)
            return (await stub.Check(health_pb2.HealthCheckRequest(), timeout=5, wait_for_ready=True)).status
        except Exception:
            return None

    async def until_health(self, wanted: int) -> None:
        give_up = time.monotonic() + 60
        while await self.health() != wanted:
            assert time.monotonic() < give_up
            await asyncio.sleep(0.02)

    async def session(self, session_id: str, max_tokens: int):
        call = session_pb2_grpc.VerifierStub(self.link).Session()
        attach = Attach(epoch=1, prompt=(1, 2, 3), max_tokens=max_tokens, ignore_eos=True)
        opening = codecs.open_to_proto(codecs.Open(session_id, attach))
        with contextlib.suppress(grpc.aio.AioRpcError):  # it may be refused before it has said anything
            await call.write(session_pb2.ClientMessage(open=opening))
        return call


async def refusal(call) -> OutriderError:
    try:
        while await call.read():
            pass
    except Exception as error:
        return error_from_rpc(error)
    raise AssertionError("it was not refused")


async def refused(alone: SingleVerifier, session_id: str) -> OutriderError:
    """Open a session and return its refusal; again where gRPC has lost the status, as it may while a client writes."""
    while "lost its status" in str(error := await refusal(await alone.session(session_id, 8))):
        pass
    return error


@pytest_asyncio.fixture(loop_scope="session")
async def alone(pair, tmp_path):
    port = free_port()
    command = [sys.executable, "-m", "cloud_verifier.app", "--model", str(pair[0]), "--listen", f"127.0.0.1:{port}"]
    flags = [*QUICK, "--drain-s", "30"]
    with (tmp_path / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *command, *flags, stdout=asyncio.subprocess.PIPE, stderr=log, cwd=ROOT
        )
    try:
        async with channel(f"127.0.0.1:{port}") as link:
            yield SingleVerifier(process, link)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_health_follows_loading_serving_and_draining_and_a_second_sigterm_ends_it(alone):
    await alone.until_health(NOT_SERVING)
    with pytest.raises(Exception, match="still loading") as early:
        await session_pb2_grpc.VerifierStub(alone.link).Describe(session_pb2.DescribeRequest())
    error = error_from_rpc(early.value)
    assert isinstance(error, Unavailable)
    assert error.retry_after_s > 0
    assert "still loading" in str(await refused(alone, "early"))
    assert (await asyncio.wait_for(alone.process.stdout.readline(), 60)).startswith(b"listening on ")
    assert await alone.health() == SERVING
    live = await alone.session("live", 900)
    assert (await live.read()).HasField("opened")
    alone.process.send_signal(signal.SIGTERM)
    await alone.until_health(NOT_SERVING)
    assert isinstance(await refused(alone, "late"), Draining)
    asked = time.monotonic()
    alone.process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(alone.process.wait(), 10) == 0
    assert time.monotonic() - asked < 8
    assert isinstance(await refusal(live), Draining)


async def test_a_drain_without_sessions_ends_at_once(alone):
    await alone.until_health(NOT_SERVING)
    await alone.until_health(SERVING)
    alone.process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(alone.process.wait(), 8) == 0  # drain_s is 30


async def test_sigterm_while_loading_ends_with_0(alone):
    await alone.until_health(NOT_SERVING)
    alone.process.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(alone.process.wait(), 8) == 0
