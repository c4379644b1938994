"""Test the beginning and end of `outrider-edge serve`: what it waits for, gives up at, and lets finish."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fake_verifier import FakeVerifier, until_live
from reciter import recital

from edge_agent import AsyncClient, EdgeSettings
from edge_agent.http import serve, streaming
from edge_agent.http.serve import serving
from edge_agent.session.statistics import Statistics
from outrider.core.errors import ModelRefused, TimedOut, Unavailable, VocabularyMismatch

LOCAL = "127.0.0.1:0"


class Loading:
    """Fail to load the target with these errors, one after the other, and then load it."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    async def prepare(self) -> None:
        if self.errors:
            raise self.errors.pop(0)


async def test_a_cluster_that_is_not_there_yet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "_RETRY_S", 0.0)
    client = Loading(Unavailable("no coordinator"), Unavailable("no verifier"), TimedOut("slow"))
    await serve._load(client)  # type: ignore[arg-type]
    assert not client.errors


@pytest.mark.parametrize(
    "error", [VocabularyMismatch("another draft"), ModelRefused("damaged"), RuntimeError("defect")]
)
async def test_what_no_further_try_mends_ends_it(tmp_path: Path, error: Exception) -> None:
    async with AsyncClient(verifier="127.0.0.1:1", cache_dir=tmp_path) as client:
        client.prepare = Loading(error).prepare  # type: ignore[method-assign,assignment]
        with pytest.raises(type(error)):
            await serve.serve(client, EdgeSettings(serve_listen=LOCAL))


async def asked(url: str, begun: asyncio.Event, *, stream: bool) -> bytes:
    """Return the body of an answer of 60 tokens. begun: is set at its first byte."""
    body, came = {"prompt": "x", "max_tokens": 60, "stream": stream}, b""
    async with (
        httpx.AsyncClient(base_url=url, timeout=60) as web,
        web.stream("POST", "v1/completions", json=body) as answer,
    ):
        async for data in answer.aiter_bytes():
            came += data
            begun.set()
    return str(answer.status_code).encode() + b" " + came


@pytest.mark.parametrize(("stop_s", "whole"), [(20.0, True), (0.2, False)])
@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_under_way_has_some_time_to_end_and_then_says_that_the_server_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop_s: float, whole: bool, stream: bool
) -> None:
    monkeypatch.setattr(serve, "STOP_S", stop_s)
    script = recital()
    script.step_s = 0.01  # without a draft a token a step: 0.6 s
    begun = asyncio.Event()
    async with (
        FakeVerifier(script) as verifier,
        AsyncClient(verifier=verifier.address, cache_dir=tmp_path, draft=None) as client,
    ):
        async with serving(client, EdgeSettings(serve_listen=LOCAL)) as url:
            reading = asyncio.create_task(asked(url, begun, stream=stream))
            await asyncio.wait_for(begun.wait() if stream else until_live(verifier), 60)
        came = await reading
    assert came.startswith(b"200" if stream or whole else b"503")
    assert (b"this server is stopping" not in came) is whole
    assert not stream or came.endswith(b"data: [DONE]\n\n")


async def sent_by(events: AsyncGenerator[bytes, None], commented: asyncio.Event, bytes_down: int) -> list[bytes]:
    """Return the bodies that a response with these events sends, that of its headers first; tell of a comment.

    bytes_down: what has come of a verifier.
    """
    sent: list[bytes] = []
    asked = SimpleNamespace(statistics=Statistics(bytes_down=bytes_down))

    async def send(message: dict[str, Any]) -> None:
        sent.append(message.get("body", b"headers"))
        if sent[-1] == streaming.COMMENT:
            commented.set()

    response = await streaming.streamed(events, [asked], lambda error: f"data: {error}\n\n".encode())  # type: ignore[list-item]
    await response({"type": "http", "asgi": {"spec_version": "2.4"}}, asyncio.Future, send)  # type: ignore[arg-type]
    return sent


@pytest.mark.parametrize("error", [None, Unavailable("no verifier")])
async def test_a_stream_has_its_headers_and_comments_before_its_first_event(
    monkeypatch: pytest.MonkeyPatch, error: Exception | None
) -> None:
    monkeypatch.setattr(streaming, "QUIET_S", 0.01)
    commented = asyncio.Event()

    async def events() -> AsyncGenerator[bytes, None]:
        await commented.wait()
        if error is not None:
            raise error
        yield b"data: one\n\n"
        yield b"data: two\n\n"

    sent = await asyncio.wait_for(sent_by(events(), commented, bytes_down=1), 60)
    rest = [body for body in sent if body != streaming.COMMENT]
    assert sent[:2] == [b"headers", streaming.COMMENT]
    assert rest[1:] == ([b"data: no verifier\n\n", b""] if error else [b"data: one\n\n", b"data: two\n\n", b""])


async def test_what_fails_before_a_verifier_has_it_has_a_status_of_its_own() -> None:
    async def events() -> AsyncGenerator[bytes, None]:
        await asyncio.sleep(0.02)
        raise Unavailable("no verifier")
        yield b""

    with pytest.raises(Unavailable):
        await sent_by(events(), asyncio.Event(), bytes_down=0)


async def test_an_idle_connection_stays_open_for_longer_than_clients_and_proxies_keep_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert serve.KEEP_ALIVE_S > 75
    monkeypatch.setattr(serve, "KEEP_ALIVE_S", 0.3)
    async with (
        AsyncClient(verifier="127.0.0.1:1", cache_dir=tmp_path, draft="none") as client,
        serving(client, EdgeSettings(serve_listen=LOCAL)) as url,
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", httpx.URL(url).port)
        writer.write(2 * b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n")  # at once: no machine is slow between them
        for _ in range(2):  # the first answer has not ended the connection
            head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 10.0)
            assert head.startswith(b"HTTP/1.1 200") and b"connection: close" not in head.lower()
            await reader.readexactly(len(b'{"status":"ok"}'))
        assert await asyncio.wait_for(reader.read(), 10.0) == b""  # the end, once it has idled for that time
        writer.close()
