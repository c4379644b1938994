"""Test that /ready says what became of the cluster, and /health only that the server lives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from fake_coordinator import FakeCoordinator
from fake_verifier import FakeVerifier

from edge_agent import AsyncClient, EdgeSettings
from edge_agent.http import app
from edge_agent.http.serve import serving
from edge_agent.sdk import sessions
from outrider.core.errors import Overloaded


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "FRESH_S", 0.0)
    monkeypatch.setattr(app, "ANSWER_S", 60.0)
    monkeypatch.setattr(sessions, "PROBE_S", 60.0)


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
        serving(client, EdgeSettings(serve_listen="127.0.0.1:0")) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as web,
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
    web: httpx.AsyncClient, coordinator: FakeCoordinator, verifier: FakeVerifier
) -> None:
    answer = await web.get("ready")
    assert (answer.status_code, answer.json()) == (200, {"status": "ready", "reason": None})
    async with FakeVerifier(verifier.script) as standby:
        coordinator.verifiers = (verifier, standby)
        await verifier.kill()
        assert (await web.get("ready")).status_code == 200
    coordinator.refuse = Overloaded("no room")  # requests wait for it
    assert (await web.get("ready")).status_code == 200
    for _ in range(6_000):
        if len(coordinator.closed) == coordinator.opened - 1:  # one was refused
            break
        await asyncio.sleep(0.01)
    assert len(coordinator.closed) == coordinator.opened - 1 >= 3


async def test_what_is_dead_is_named_and_a_verifier_that_is_back_is_found(
    web: httpx.AsyncClient, coordinator: FakeCoordinator, verifier: FakeVerifier, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = verifier.address
    await verifier.kill()
    with monkeypatch.context() as briefly:
        briefly.setattr(sessions, "PROBE_S", 0.05)
        assert f"at {address}, which the coordinator named, cannot be reached" in await unready(web)
    await verifier.start(address)
    for _ in range(1_200):
        if (answer := await web.get("ready")).status_code == 200:
            break
        await asyncio.sleep(0.05)
    assert answer.status_code == 200
    await coordinator.__aexit__()
    reason = f"the coordinator at {coordinator.address} (--coordinator) cannot be reached"
    assert (await unready(web)).startswith(reason)
    answer = await web.post("v1/completions", json={"prompt": "def", "max_tokens": 4})
    assert answer.status_code == 503 and "(--coordinator) cannot be reached" in answer.text


async def test_a_coordinator_that_hangs_does_not_keep_a_health_check_waiting(
    web: httpx.AsyncClient, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "ANSWER_S", 0.05)
    coordinator.answering.clear()
    assert await unready(web) == "the cluster has not answered within 0.05 s"
    coordinator.answering.set()


async def test_those_who_ask_within_seconds_share_one_probe(
    web: httpx.AsyncClient, coordinator: FakeCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "FRESH_S", 60.0)
    before = coordinator.opened
    answers = await asyncio.gather(*(web.get("ready") for _ in range(8)))
    assert [answer.status_code for answer in answers] == [200] * 8
    assert coordinator.opened == before + 1


async def test_it_is_ready_without_a_cluster_where_the_draft_may_write_alone(
    client: AsyncClient, coordinator: FakeCoordinator, tmp_path: Path, edge_settings: EdgeSettings
) -> None:
    await client.prepare()
    await coordinator.__aexit__()
    later = AsyncClient(
        coordinator=coordinator.address, cache_dir=tmp_path, settings=edge_settings, offline="draft_only"
    )
    async with (
        later,
        serving(later, EdgeSettings(serve_listen="127.0.0.1:0")) as url,
        httpx.AsyncClient(base_url=url, timeout=60) as web,
    ):
        await later.prepare()
        answer = await web.get("ready")
        assert (answer.status_code, answer.json()["status"]) == (200, "offline")
        assert "(--coordinator) cannot be reached" in answer.json()["reason"]
        assert (await web.post("v1/completions", json={"prompt": "def", "max_tokens": 4})).status_code == 200
