"""Test who may use the OpenAI-compatible server, and the names of a request on its way to the verifier."""

from __future__ import annotations

import asyncio
import io
import logging
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from fake_verifier import FakeVerifier
from openai import AsyncOpenAI, AuthenticationError

from edge_agent import AsyncClient, EdgeSettings
from edge_agent.http import access
from edge_agent.http.serve import check, serving
from outrider.core.errors import BadRequest
from outrider.telemetry import logs

LOCAL = "127.0.0.1:0"


@pytest.fixture
def edge_settings() -> EdgeSettings:
    return EdgeSettings()


@pytest.fixture
async def web(client: AsyncClient) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serving(client, EdgeSettings(serve_listen=LOCAL)) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as made,
    ):
        await client.prepare()
        yield made


@pytest.fixture
def said() -> Iterator[io.StringIO]:
    """Collect the server's log, as people read it."""
    lines, server = io.StringIO(), logging.getLogger("edge_agent.http")
    handler, level = logging.StreamHandler(lines), server.level
    handler.setFormatter(logs.TextFormatter("edge"))
    server.addHandler(handler)
    server.setLevel(logging.INFO)
    yield lines
    server.removeHandler(handler)
    server.setLevel(level)


async def lines_of(said: io.StringIO, about: str = " in ") -> list[str]:
    """Return the lines once the request's own is there, which may come after its answer."""
    for _ in range(6_000):
        if about in said.getvalue():
            return said.getvalue().splitlines()
        await asyncio.sleep(0.01)
    pytest.fail(f"nothing was logged with {about!r}")


# --- by which name


async def test_a_requests_id_is_in_the_log_and_in_the_call_to_the_verifier(
    web: httpx.AsyncClient, verifier: FakeVerifier, said: io.StringIO
) -> None:
    body = {"prompt": "x", "max_tokens": 3, "stream": True}
    answer = await web.post("v1/completions", json=body, headers={"x-request-id": "mine-2"})
    assert answer.status_code == 200
    assert verifier.metadata[-1]["x-request-id"] == "mine-2"
    [line] = await lines_of(said)
    assert "POST /v1/completions 200 in " in line
    assert line.endswith("[request=mine-2]")
    assert answer.headers["x-request-id"] == "mine-2"
    assert len((await web.get("health", headers={"x-request-id": "two words"})).headers["x-request-id"]) == 32


async def test_what_nobody_expected_is_reported_and_logged_under_the_requests_id(
    web: httpx.AsyncClient, client: AsyncClient, said: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken() -> None:
        raise RuntimeError("nobody expected this")

    monkeypatch.setattr(client, "prepare", broken)
    answer = await web.get("v1/models", headers={"x-request-id": "mine-3"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "mine-3")
    assert answer.json()["error"]["code"] == "internal_error"
    first, second, *_, last = await lines_of(said, "GET /v1/models 500")
    assert first.endswith("a request failed [request=mine-3]")
    assert second.startswith("Traceback")
    assert last.endswith("[request=mine-3]")


# --- who


async def test_a_key_is_asked_for_where_one_is_set_and_pages_of_any_origin_may_ask_with_it(
    client: AsyncClient, web: httpx.AsyncClient
) -> None:
    origin = {"origin": "https://chat.example"}
    assert "access-control-allow-origin" not in (await web.get("health", headers=origin)).headers
    options = EdgeSettings(serve_listen=LOCAL, serve_api_key="sesame")
    async with serving(client, options) as url:
        async with AsyncOpenAI(base_url=f"{url}v1", api_key="wrong", max_retries=0) as unauthorised:
            with pytest.raises(AuthenticationError):
                await unauthorised.models.list()
        async with AsyncOpenAI(base_url=f"{url}v1", api_key="sesame") as friend:
            assert (await friend.models.list()).data
        async with httpx.AsyncClient(base_url=url) as page:
            assert (await page.get("health")).status_code != 401
            refused = await page.get("v1/models", headers=origin)
            assert refused.status_code == 401
            assert refused.headers["access-control-allow-origin"] == "*"
            asks = {
                **origin,
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization",
            }
            assert (await page.options("v1/completions", headers=asks)).status_code == 200


async def test_a_body_that_is_too_large_is_not_read(client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "MAX_BODY_BYTES", 2000)

    async def endless() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 1000

    async with (
        serving(client, EdgeSettings(serve_listen=LOCAL)) as url,
        httpx.AsyncClient(base_url=url) as web,
    ):
        for content in (b"x" * 3000, endless()):
            answer = await web.post("v1/completions", content=content, headers={"content-type": "application/json"})
            assert answer.status_code == 413
            assert answer.json()["error"]["code"] == "too_large"


def test_an_address_beyond_this_machine_needs_a_key() -> None:
    for listen in ("0.0.0.0:0", "example.org:80"):
        with pytest.raises(BadRequest):
            check(EdgeSettings(serve_listen=listen))
    check(EdgeSettings(serve_listen="0.0.0.0:0", serve_api_key="k"))
    check(EdgeSettings(serve_listen="0.0.0.0:0", serve_without_key=True))


async def test_without_a_key_a_page_cannot_come_in_by_a_name_of_its_own(
    web: httpx.AsyncClient, client: AsyncClient
) -> None:
    for host in ("localhost", "LocalHost:8080", "127.0.0.1:1", "[::1]:8080"):
        assert (await web.get("v1/models", headers={"host": host})).status_code == 200
    for host in ("evil.example", "evil.example:8080", "127.0.0.1.evil.example", "[::1"):
        answer = await web.get("v1/models", headers={"host": host})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "unknown_host")
    for options in (
        EdgeSettings(serve_listen=LOCAL, serve_api_key="sesame"),
        EdgeSettings(serve_listen=LOCAL, serve_without_key=True),
    ):
        headers = {"host": "device.example", "authorization": "Bearer sesame"}
        async with serving(client, options) as url, httpx.AsyncClient(base_url=url, headers=headers) as named:
            assert (await named.get("v1/models")).status_code == 200


# --- what is counted


async def test_answers_are_counted_by_route_and_status(web: httpx.AsyncClient) -> None:
    for path in ("v1/models", "v1/models/other", "v1/made/up", "health", "health"):
        await web.get(path)
    await web.post("v1/completions", json={})
    await web.get("health", headers={"host": "elsewhere"})
    counted = dict(
        line.rsplit(" ", 1)
        for line in (await web.get("metrics")).text.splitlines()
        if line.startswith("outrider_edge_http_requests_total")
    )
    assert {name.partition("{")[2]: float(value) for name, value in counted.items()} == {
        'code="200",path="/v1/models"}': 1,
        'code="404",path="/v1/models/{name}"}': 1,
        'code="404",path=""}': 1,
        'code="200",path="/health"}': 2,
        'code="400",path="/v1/completions"}': 1,
        'code="403",path=""}': 1,
    }
