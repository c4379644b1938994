"""Test how much one client of the HTTP server may take from others, by its choices and by unread streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_verifier import FakeVerifier, until_free
from reciter import TEXT, recital

from edge_agent import AsyncClient, EdgeSettings
from edge_agent.http import serve, streaming
from edge_agent.http.serve import serving

LOCAL = "127.0.0.1:0"
CHAT = [{"role": "user", "content": "x"}]


@pytest.fixture
async def verifier() -> AsyncIterator[FakeVerifier]:
    async with FakeVerifier(recital()) as running:
        yield running


@contextlib.asynccontextmanager
async def served(
    verifier: FakeVerifier, tmp_path: Path, **given: Any
) -> AsyncIterator[tuple[AsyncClient, httpx.AsyncClient]]:
    """Yield (the server's own client, a client of the server)."""
    settings = EdgeSettings(serve_listen=LOCAL, **given)
    async with (
        AsyncClient(verifier=verifier.address, cache_dir=tmp_path, draft="ngram", settings=settings) as client,
        serving(client, settings) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as web,
    ):
        await client.prepare()
        yield client, web


async def asked_and_unread(url: httpx.URL, body: dict[str, Any]) -> socket.socket:
    """Return a client's socket with a tiny buffer, which has read only the first bytes of the answer."""
    loop, content = asyncio.get_running_loop(), json.dumps(body).encode()
    unread = socket.socket()
    unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    unread.setblocking(False)
    await loop.sock_connect(unread, (url.host, url.port))
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: {url.host}\r\ncontent-type: application/json\r\n"
    await loop.sock_sendall(unread, f"{head}content-length: {len(content)}\r\n\r\n".encode() + content)
    assert (await loop.sock_recv(unread, 100)).startswith(b"HTTP/1.1 200 OK")
    return unread


async def test_a_client_that_reads_no_more_gives_its_place_back(
    verifier: FakeVerifier, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "STALL_S", 0.05)
    monkeypatch.setattr(serve, "STOP_S", 0.5)
    verifier.script.step_s = 0.0005
    wordy = {"messages": CHAT, "max_tokens": 8000, "stream": True, "logprobs": True, "top_logprobs": 20}
    async with served(verifier, tmp_path, max_sessions=1) as (_, web):
        with contextlib.closing(await asked_and_unread(web.base_url, wordy)):
            answer = await web.post("v1/completions", json={"prompt": "x", "max_tokens": 3})
            assert answer.status_code == 200
            assert "took nothing of its stream for 0.05 s" in caplog.text
            await until_free(verifier)


async def test_no_log_holds_a_prompt_or_generated_text(
    verifier: FakeVerifier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    body = {"prompt": "words of a prompt", "max_tokens": 60, "temperature": 0, "stream": True}
    async with served(verifier, tmp_path) as (_, web):
        answer = await web.post("v1/completions", json=body)
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: {")]
    texts = [json.loads(event)["choices"][0]["text"] for event in events]
    assert TEXT[:15] in "".join(texts)
    assert "POST /v1/completions 200" in caplog.text
    for secret in (*events, body["prompt"], "grüße", "def gr", "return f'"):
        assert secret not in caplog.text


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": "x", "n": 3}, "n"),
        ("completions", {"prompt": ["x", "y"], "n": 2}, "n"),
        ("completions", {"prompt": ["x", "y", "z"]}, "prompt"),
        ("chat/completions", {"messages": CHAT, "n": 3}, "n"),
    ],
)
async def test_a_request_that_would_take_more_than_half_of_the_places_is_refused(
    verifier: FakeVerifier,
    tmp_path: Path,
    path: str,
    body: dict[str, Any],
    param: str,
) -> None:
    async with served(verifier, tmp_path, max_sessions=4) as (_, web):
        answer = await web.post(f"v1/{path}", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, param, "invalid_value")
        assert "at most 2" in error["message"] and "--max-sessions" in error["message"]
        allowed = await web.post("v1/chat/completions", json={"messages": CHAT, "n": 2, "max_tokens": 2})
        assert len(allowed.json()["choices"]) == 2
