"""Test the beginning and end of `outrider-edge serve`: what it waits for, gives up at, and lets finish."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import httpx
import pytest
from fake_verifier import FakeVerifier
from reciter import recital

from edge_agent import AsyncClient, EdgeSettings
from edge_agent.http import app
from edge_agent.http.options import ServeOptions
from edge_agent.http.serve import serve, serving
from edge_agent.sdk import sessions

LOCAL = "127.0.0.1:0"
IMPATIENT = EdgeSettings(resume_budget_s=0.2, open_budget_s=0.2)


async def url_of(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the address at which `serve` listens, from its output."""
    said = ""
    for _ in range(500):
        said += capsys.readouterr().out
        if "serving at " in said and said.endswith("v1\n"):
            return said.split("serving at ")[1].removesuffix("v1\n")
        await asyncio.sleep(0.01)
    pytest.fail(f"it does not serve: {said!r}")


async def readiness_of(url: str, wanted: int) -> int:
    """Return the answer of /ready once it is as expected, or at the end of the wait."""
    status = 0
    async with httpx.AsyncClient(base_url=url) as web:
        for _ in range(1000):
            status = (await web.get("ready")).status_code
            if status == wanted:
                break
            await asyncio.sleep(0.01)
    return status


async def test_a_verifier_that_is_not_there_yet_is_waited_for_until_a_signal_ends_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "FRESH_S", 0.0)
    monkeypatch.setattr(sessions, "PROBE_S", 0.1)
    late = FakeVerifier(recital())
    await late.start()
    address = late.address
    await late.kill()
    async with AsyncClient(verifier=address, cache_dir=tmp_path, draft=None, settings=IMPATIENT) as client:
        running = asyncio.create_task(serve(client, ServeOptions(LOCAL)))
        url = await url_of(capsys)
        assert await readiness_of(url, 503) == 503
        await late.start(address)
        assert await readiness_of(url, 200) == 200
        os.kill(os.getpid(), signal.SIGTERM)
        assert await asyncio.wait_for(running, 10) is None
    await late.kill()


async def streamed(url: str, begun: asyncio.Event, tokens: int = 60) -> bytes:
    """Return everything received of a stream, until its end or until it is cut."""
    came = b""
    try:
        async with (
            httpx.AsyncClient(base_url=url, timeout=30) as web,
            web.stream("POST", "v1/completions", json={"prompt": "x", "max_tokens": tokens, "stream": True}) as answer,
        ):
            async for data in answer.aiter_bytes():
                came += data
                begun.set()
    except httpx.TransportError:
        pass
    return came


@pytest.mark.parametrize(("stop_s", "whole"), [(20.0, True), (0.2, False)])
async def test_a_stream_under_way_has_so_long_as_the_setting_says(tmp_path: Path, stop_s: float, whole: bool) -> None:
    script = recital()
    script.step_s = 0.01  # without a draft a token a step: 0.6 s
    begun = asyncio.Event()
    async with (
        FakeVerifier(script) as verifier,
        AsyncClient(verifier=verifier.address, cache_dir=tmp_path, draft=None) as client,
    ):
        async with serving(client, ServeOptions(LOCAL, stop_s=stop_s)) as url:
            reading = asyncio.create_task(streamed(url, begun))
            await asyncio.wait_for(begun.wait(), 10)
        assert (b"data: [DONE]" in await reading) is whole
