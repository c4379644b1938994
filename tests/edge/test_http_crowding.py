"""Test how much one client of the HTTP server may take from others, by its choices and by unread streams."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_verifier import FakeVerifier, until_free
from reciter import TEXT, recital

from edge_agent import AsyncClient, EdgeSettings
from edge_agent.http.options import ServeOptions
from edge_agent.http.serve import serving
from edge_agent.http.streaming import EventStream

LOCAL = "127.0.0.1:0"
CHAT = [{"role": "user", "content": "x"}]


@pytest.fixture
async def verifier() -> AsyncIterator[FakeVerifier]:
    async with FakeVerifier(recital()) as running:
        yield running


@contextlib.asynccontextmanager
async def served(
    verifier: FakeVerifier, tmp_path: Path, options: ServeOptions, **settings: Any
) -> AsyncIterator[tuple[AsyncClient, httpx.AsyncClient]]:
    """Yield (the server's own client, a client of the server)."""
    async with (
        AsyncClient(
            verifier=verifier.address, cache_dir=tmp_path, draft="ngram", settings=EdgeSettings(**settings)
        ) as client,
        serving(client, options) as url,
        httpx.AsyncClient(base_url=url, timeout=30) as web,
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
    verifier: FakeVerifier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    verifier.script.step_s = 0.0005
    wordy = {"messages": CHAT, "max_tokens": 8000, "stream": True, "logprobs": True, "top_logprobs": 20}
    async with served(verifier, tmp_path, ServeOptions(LOCAL, stall_s=0.5, stop_s=0.5), max_sessions=1) as (_, web):
        with contextlib.closing(await asked_and_unread(web.base_url, wordy)):
            answer = await web.post("v1/completions", json={"prompt": "x", "max_tokens": 3})
            assert answer.status_code == 200
            assert "took nothing of its stream for 0.5 s" in caplog.text
            await until_free(verifier)


async def test_a_client_that_reads_slowly_has_all_of_its_stream() -> None:
    taken: list[bytes] = []

    async def events() -> AsyncGenerator[bytes, None]:
        for number in range(60):
            yield b"%d " % number

    async def send(message: Any) -> None:
        await asyncio.sleep(0.02)
        taken.append(message.get("body", b""))

    async def receive() -> Any:
        await asyncio.Event().wait()

    await EventStream(b"begin ", events(), stall_s=1.0)({"type": "http", "method": "POST"}, receive, send)
    assert b"".join(taken) == b"begin " + b"".join(b"%d " % number for number in range(60))


@pytest.mark.parametrize(
    ("kind", "more"), [("start", None), ("body", True), ("body", False)], ids=["first", "event", "last"]
)
async def test_a_client_that_does_not_take_a_message_ends_its_stream(
    caplog: pytest.LogCaptureFixture, kind: str, more: bool | None
) -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        yield b"second"

    async def send(message: Any) -> None:
        if (message["type"], message.get("more_body")) == (f"http.response.{kind}", more):
            await asyncio.Event().wait()

    async def receive() -> Any:
        await asyncio.Event().wait()

    rest = events()
    async with asyncio.timeout(10):
        await EventStream(b"first", rest, stall_s=0.05)({"type": "http", "method": "POST"}, receive, send)
    assert "took nothing of its stream for 0.05 s" in caplog.text
    assert await anext(rest, None) is None


async def test_no_log_holds_a_prompt_or_generated_text(
    verifier: FakeVerifier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    body = {"prompt": "words of a prompt", "max_tokens": 60, "temperature": 0, "stream": True}
    async with served(verifier, tmp_path, ServeOptions(LOCAL)) as (_, web):
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
    verifier: FakeVerifier, tmp_path: Path, path: str, body: dict[str, Any], param: str
) -> None:
    async with served(verifier, tmp_path, ServeOptions(LOCAL, max_choices=2)) as (_, web):
        answer = await web.post(f"v1/{path}", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, param, "invalid_value")
        assert "at most 2" in error["message"] and "--max-sessions" in error["message"]
        allowed = await web.post("v1/chat/completions", json={"messages": CHAT, "n": 2, "max_tokens": 2})
        assert len(allowed.json()["choices"]) == 2


@pytest.mark.parametrize(("sessions", "choices"), [(1, 1), (2, 1), (3, 1), (64, 32)])
def test_a_request_may_have_half_of_the_places(sessions: int, choices: int) -> None:
    assert ServeOptions.of(EdgeSettings(max_sessions=sessions)).max_choices == choices


async def test_a_prompt_of_several_choices_is_tokenised_once(
    verifier: FakeVerifier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(verifier, tmp_path, ServeOptions(LOCAL)) as (client, web):
        tokenizer = (await client.prepare()).tokenizer
        encoded_texts: list[str] = []

        def recording(encode: Callable[[str], list[int]]) -> Callable[[str], list[int]]:
            def encoded(text: str) -> list[int]:
                encoded_texts.append(text)
                return encode(text)

            return encoded

        for name in ("encode", "encode_prompt"):
            monkeypatch.setattr(tokenizer, name, recording(getattr(tokenizer, name)))
        for path, body in (
            ("completions", {"prompt": ["ab", "c"], "n": 3, "echo": True}),
            ("chat/completions", {"messages": CHAT, "n": 3}),
        ):
            answer = await web.post(f"v1/{path}", json={**body, "max_tokens": 2, "seed": 7})
            assert answer.status_code == 200
        assert encoded_texts == ["ab", "c", "<|user|>x<|end|>"]
    seeds = [opening.attach.sampling.seed for opening in verifier.opens]
    assert sorted(seeds) == sorted([*range(7, 13), *range(7, 10)])
    prompts = [opening.attach.prompt for opening in verifier.opens]
    assert sorted(prompts.count(prompt) for prompt in set(prompts)) == [3, 3, 3]
