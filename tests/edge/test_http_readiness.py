"""Test that /ready says what became of the cluster, and /health only that the server lives."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fake_coordinator import FakeCoordinator
from fake_verifier import FakeVerifier

from edge_agent import AsyncClient, EdgeSettings
from edge_agent.http import readiness
from edge_agent.http.options import ServeOptions
from edge_agent.http.serve import serving
from edge_agent.sdk import sessions
from outrider.core.errors import Overloaded, Unavailable


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "FRESH_S", 0.0)


@pytest.fixture
async def coordinator(verifier: FakeVerifier) -> AsyncIterator[FakeCoordinator]:
    async with FakeCoordinator(verifier) as running:
        yield running


@pytest.fixture
async def client(
    coordinator: FakeCoordinator, tmp_path: Path, edge_settings: EdgeSettings
) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(coordinator=coordinator.address, cache_dir=tmp_path, settings=edge_settings) as made:
        yield made


@pytest.fixture
async def web(client: AsyncClient) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        serving(client, ServeOptions("127.0.0.1:0")) as url,
        httpx.AsyncClient(base_url=url, timeout=20) as web,
    ):
        assert (await web.get("ready")).json()["status"] == "loading"
        await client.prepare()
        yield web


async def unready(web: httpx.AsyncClient) -> str:
    """Return the reason, after checking that the server says that it lives."""
    assert (await web.get("health")).json() == {"status": "ok"}
    answer = await web.get("ready")
    assert answer.status_code == 503 and answer.json()["status"] == "unreachable"
    return str(answer.json()["reason"])


async def test_it_is_ready_while_both_answer_and_leaves_no_session_behind(
    web: httpx.AsyncClient, coordinator: FakeCoordinator
) -> None:
    for _ in range(3):
        answer = await web.get("ready")
        assert (answer.status_code, answer.json()) == (200, {"status": "ready", "reason": None})
    for _ in range(500):
        if len(coordinator.closed) == coordinator.opened:
            break
        await asyncio.sleep(0.01)
    assert len(coordinator.closed) == coordinator.opened >= 4


async def test_a_dead_verifier_is_named_and_one_that_is_back_is_found(
    web: httpx.AsyncClient, verifier: FakeVerifier
) -> None:
    address = verifier.address
    await verifier.kill()
    assert f"at {address}, which the coordinator named, cannot be reached" in await unready(web)
    await verifier.start(address)
    await until_ready(web)


async def until_ready(web: httpx.AsyncClient) -> None:
    for _ in range(200):
        if (answer := await web.get("ready")).status_code == 200:
            break
        await asyncio.sleep(0.05)
    assert answer.status_code == 200


async def test_it_is_ready_by_the_standby_while_the_primary_is_dead(
    web: httpx.AsyncClient, coordinator: FakeCoordinator, verifier: FakeVerifier
) -> None:
    async with FakeVerifier(verifier.script) as standby:
        coordinator.verifiers = (verifier, standby)
        await verifier.kill()
        assert (await web.get("ready")).status_code == 200
    assert f"at {standby.address}, which the coordinator named, cannot be reached" in await unready(web)
    assert not coordinator.resumed  # each was asked once


async def test_a_dead_coordinator_is_named(web: httpx.AsyncClient, coordinator: FakeCoordinator) -> None:
    await coordinator.__aexit__()
    assert (await unready(web)).startswith(
        f"the coordinator at {coordinator.address} (--coordinator) cannot be reached"
    )


async def test_a_coordinator_that_hangs_does_not_keep_a_health_check_waiting(
    web: httpx.AsyncClient, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "PROBE_S", 0.2)
    monkeypatch.setattr(readiness, "ANSWER_S", 0.3)
    coordinator.answering.clear()
    assert await unready(web) == "the cluster has not answered within 0.3 s"
    coordinator.answering.set()


async def test_a_cluster_is_ready_although_its_probe_takes_longer_than_a_health_check_waits(
    web: httpx.AsyncClient, client: AsyncClient, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "ANSWER_S", 0.1)
    client._sessions._channels.timeout.measured(4.0)
    coordinator.answering.clear()
    for _ in range(8):
        begun = time.monotonic()
        assert (await web.get("ready")).status_code == 200
        assert time.monotonic() - begun < 1.0
    assert client.probe_s == 2.5 + 4 * 4.0
    coordinator.answering.set()


async def test_a_full_cluster_is_ready_since_requests_wait_for_room(
    web: httpx.AsyncClient, coordinator: FakeCoordinator
) -> None:
    coordinator.refuse = Overloaded("no room")
    assert (await web.get("ready")).status_code == 200


async def test_those_who_ask_within_seconds_share_one_probe(
    web: httpx.AsyncClient, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "FRESH_S", 60.0)
    before = coordinator.opened
    answers = await asyncio.gather(*(web.get("ready") for _ in range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8
    assert coordinator.opened == before + 1


async def test_a_request_to_a_dead_coordinator_fails_within_about_three_seconds(
    web: httpx.AsyncClient, coordinator: FakeCoordinator
) -> None:
    await coordinator.__aexit__()
    begun = time.monotonic()
    answer = await web.post("v1/completions", json={"prompt": "def", "max_tokens": 4})
    assert answer.status_code == 503 and "(--coordinator) cannot be reached" in answer.text
    assert time.monotonic() - begun < 3.5


async def test_a_probe_that_ended_long_ago_is_made_again(
    client: AsyncClient, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "ANSWER_S", 0.01)
    monkeypatch.setattr(readiness, "FRESH_S", 5.0)
    now, answers = 0.0, asyncio.Queue[None]()

    async def probe() -> None:
        await answers.get()
        raise Unavailable("away")

    await client.prepare()
    monkeypatch.setattr(client, "probe", probe)
    ready = readiness.Readiness(client, lambda: now)
    await ready.unready()
    answers.put_nowait(None)
    await asyncio.sleep(0.05)
    assert await ready.unready() == "away"
    monkeypatch.setattr(client, "probe", lambda: asyncio.sleep(0))
    now = 60.0
    assert await ready.unready() == ""
