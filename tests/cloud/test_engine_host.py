"""Test the engine's own process with a tiny random model: start, serve, die. Most of the time goes to loading torch."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from pydantic import SecretStr
from scripted_engine import until
from session_messages import attach, directive

from cloud_verifier.config import LIMITS, VerifierConfig
from cloud_verifier.engine_process import ipc
from cloud_verifier.engine_process.host import EngineHost
from outrider.core import errors
from outrider.core.errors import Fenced, ModelRefused, Overloaded, Unavailable
from outrider.core.protocol.messages import SessionLimits
from outrider.wire.v1 import engine_pb2, session_pb2

PROMPT = (3, 1, 4, 1, 5)


def start(epoch: int = 1, *, prompt=PROMPT, max_tokens: int = 8, ignore_eos: bool = True, session_id: str = "s"):
    return engine_pb2.EngineRequest(
        session_id=session_id,
        epoch=epoch,
        start=engine_pb2.Start(
            attach=attach(epoch, prompt, max_tokens=max_tokens, ignore_eos=ignore_eos),
            limits=SessionLimits(nodes=16).message,
            directive=directive(draft_wait_ms=0),
        ),
    )


async def tokens_of(inbox) -> list[int]:
    """Return everything up to the last commit. Raises the engine's refusal."""
    tokens: list[int] = []
    async with asyncio.timeout(120):
        while True:
            event = await inbox.get()
            if event.WhichOneof("kind") == "failure":
                raise ipc.error_from_failure(event.failure)
            tokens += event.commit.token
            if event.commit.finish != session_pb2.FINISH_NONE:
                return tokens


def command_line(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.fixture
def config(tiny_directory):
    return VerifierConfig(model=tiny_directory("llama"), kv_slots=256, max_sessions=4, join_token=SecretStr("sesame"))


async def test_an_engine_serves_refuses_and_forgets_and_its_death_ends_all_streams(config, reference, capfd):
    progress: list[str] = []
    host = EngineHost(config)
    host.on_progress = progress.append
    try:
        ready = await host.start()
        assert ready.vocabulary_size == 101
        assert ready.max_sequence == 256 - LIMITS.nodes
        assert ready.target.weights_hash.startswith("sha256:")
        assert any("numerics check" in text for text in progress)
        assert any("takes trees of up to" in text and "has up to 256 tokens" in text for text in progress)
        assert b"sesame" not in command_line(host._process.pid)
        assert "Loading weights" not in capfd.readouterr().err

        inbox = host.register("s", 1)
        host.send(start())
        assert await tokens_of(inbox) == reference("llama").generate(list(PROMPT), 8, ignore_eos=True)
        host.release("s", 1, inbox)

        # What it refuses is reported to that session, in the error's own class.
        for session_id, request, expected in [
            ("long", start(prompt=(1,) * 250, session_id="long"), errors.BadRequest),
            ("s", start(epoch=1), Fenced),
            ("big", start(prompt=(1,) * 150, max_tokens=90, session_id="big"), None),
            ("more", start(prompt=(2,) * 150, max_tokens=90, session_id="more"), Overloaded),
        ]:
            inbox = host.register(session_id, 1)
            host.send(request)
            if expected is not None:
                with pytest.raises(expected):
                    await tokens_of(inbox)
                host.release(session_id, 1, inbox)

        # An epoch that the engine refuses has displaced the older one, which must not be held for ever.
        await until(lambda: host.stats.verifier.kv_used > 0)
        newer = host.register("big", 2)
        host.send(start(epoch=2, prompt=(1,) * 250, session_id="big"))
        with pytest.raises(errors.BadRequest):
            await tokens_of(newer)
        host.release("big", 2, newer)
        host.release("big", 1, inbox)
        await until(lambda: host.stats.verifier.kv_used == 0 and host.stats.verifier.live_sessions == 0)

        # SIGTERM reaches the whole group where a supervisor sends it; the front alone decides.
        os.kill(host._process.pid, signal.SIGTERM)
        inbox = host.register("after", 1)
        host.send(start(session_id="after"))
        assert len(await tokens_of(inbox)) == 8

        inbox = host.register("last", 1)
        os.kill(host._process.pid, signal.SIGKILL)
        with pytest.raises(Unavailable, match="engine process has ended"):
            await tokens_of(inbox)
        async with asyncio.timeout(60):
            await host.ended.wait()
        with pytest.raises(Unavailable):
            host.register("too late", 1)
    finally:
        await host.stop()


async def test_a_model_that_cannot_be_served_is_refused_with_the_reason(config, tmp_path):
    host = EngineHost(config.model_copy(update={"model": tmp_path}))
    try:
        with pytest.raises(ModelRefused, match="has no config"):
            await host.start()
    finally:
        await host.stop()


@pytest.mark.parametrize(
    "error",
    [
        errors.BadRequest.bound("prompt", 9, "at most 8"),
        errors.ProtocolViolation("base is 9", field="base"),
        errors.Overloaded("full", retry_after_s=2.5),
        errors.Fenced("older"),
        errors.InternalError("oh"),
    ],
)
def test_an_error_survives_the_way_between_the_processes(error):
    back = ipc.error_from_failure(ipc.failure_event(error).failure)
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert vars(back) == vars(error)


@pytest.mark.parametrize("kind", ["SystemExit", "Path", "annotations", "", "__class__"])
def test_only_our_own_errors_are_made_of_a_failure(kind):
    assert type(ipc.error_from_failure(engine_pb2.EngineFailure(kind=kind, message="m"))) is errors.InternalError
