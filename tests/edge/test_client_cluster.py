"""Test a client of a cluster: it begins with any verifier that answers, and closes at once whatever it waits for."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from fake_coordinator import FakeCoordinator
from fake_verifier import FakeVerifier, Script
from scripted import tokenizer_json

from edge_agent import AsyncClient
from edge_agent.bench.delay import DelayedAddresses
from edge_agent.session import stream
from edge_agent.target import artifacts
from edge_agent.target.tokenizer import TargetTokenizer
from outrider.core.acceptance.calibrator import Calibrator
from outrider.core.errors import BadRequest, Unauthenticated, Unavailable
from outrider.wire.v1 import coordinator_pb2 as pb


def script() -> Script:
    size = len(TargetTokenizer(tokenizer_json()).table)
    return Script(lambda _: 65, tokenizer_json=tokenizer_json(), vocabulary_size=size, chunk_bytes=100_000)


@pytest.fixture
async def verifiers() -> AsyncIterator[tuple[FakeVerifier, FakeVerifier]]:
    async with FakeVerifier(script(), "one") as one, FakeVerifier(script(), "two") as two:
        yield one, two


@pytest.fixture
async def coordinator(verifiers: tuple[FakeVerifier, FakeVerifier]) -> AsyncIterator[FakeCoordinator]:
    async with FakeCoordinator(*verifiers) as running:
        yield running


@pytest.fixture
async def client(coordinator: FakeCoordinator, tmp_path: Path) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(coordinator=coordinator.address, cache_dir=tmp_path, draft=None) as made:
        yield made


async def until(condition: Callable[[], object]) -> None:
    for _ in range(6_000):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it did not come to that")


async def test_sessions_say_of_what_kind_they_are_and_begin_with_what_was_measured_of_it(
    coordinator: FakeCoordinator, tmp_path: Path
) -> None:
    coordinator.prior = pb.Prior(first_acceptance=0.1, sibling_acceptance=0.2, observations=200)
    async with AsyncClient(
        coordinator=coordinator.address, cache_dir=tmp_path, draft="ngram", traffic_class="code"
    ) as client:
        await client.generate([1, 2], max_tokens=2)
        await client.generate([1, 2], max_tokens=2, traffic_class="chat")
        bundle = await client.prepare()
        assert bundle.draft is not None
        assert bundle.draft.ngram_calibrators[0].probability(0, 1.2, 1) < Calibrator().probability(0, 1.2, 1) - 0.2
    kinds = [(request.draft_release, request.traffic_class) for request in coordinator.asked]
    assert kinds == [("", ""), ("ngram", "code"), ("ngram", "chat")]  # the first one fetched what the target needs


def begin(client: AsyncClient, count: int = 3) -> list[asyncio.Task[object]]:
    return [asyncio.create_task(client.generate([1, 2], max_tokens=5)) for _ in range(count)]  # type: ignore[misc]


async def test_closing_ends_requests_that_wait_for_a_hung_verifiers_description(
    client: AsyncClient, verifiers: tuple[FakeVerifier, FakeVerifier], coordinator: FakeCoordinator
) -> None:
    for verifier in verifiers:
        verifier.freeze()
    waiting = begin(client)
    await until(lambda: coordinator.opened == 1)
    await client.close()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert all(isinstance(result, BadRequest) and "closed" in str(result) for result in results), results
    assert coordinator.closed == ["session-1"]


async def test_verifiers_far_away_are_reached_although_the_coordinator_is_near(
    coordinator: FakeCoordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, name in ((stream, "SILENCE_S"), (stream, "_CONNECT_S"), (artifacts, "DESCRIBE_S")):
        monkeypatch.setattr(module, name, 0.1)
    async with (
        DelayedAddresses(800.0) as ways,
        AsyncClient(coordinator=coordinator.address, cache_dir=tmp_path, draft=None, reroute=ways) as client,
    ):
        completion = await client.generate([1, 2], max_tokens=3, timeout=100.0)
    assert len(completion.token_ids) == 3


async def test_new_tickets_that_are_refused_like_the_old_ones_end_a_request(
    client: AsyncClient, coordinator: FakeCoordinator, verifiers: tuple[FakeVerifier, FakeVerifier]
) -> None:
    await client.prepare()
    for verifier in verifiers:
        verifier.script.refuse = Unauthenticated("the ticket expired 695 s ago; compare the clocks")
    with pytest.raises(Unauthenticated, match="compare the clocks"):
        await client.generate([1, 2], max_tokens=3, retries=0)
    assert len(coordinator.resumed) == 2


GONE = Unavailable("no verifier is registered", retry_after_s=0.1)


async def test_a_request_waits_for_a_verifier_longer_than_all_retries_would(
    client: AsyncClient, coordinator: FakeCoordinator, caplog: pytest.LogCaptureFixture
) -> None:
    await client.prepare()
    coordinator.refuse = GONE
    before = coordinator.opened
    (waiting,) = begin(client, 1)
    await until(lambda: coordinator.opened >= before + 10)
    coordinator.refuse = None
    assert (await waiting).token_ids
    told = [record.getMessage() for record in caplog.records if record.name == "edge_agent.sdk.sessions"]
    assert told == ["no verifier is registered; requests wait for one"]


async def test_whenever_a_request_is_cancelled_its_session_is_closed(
    client: AsyncClient, coordinator: FakeCoordinator
) -> None:
    await client.prepare()
    for turn in itertools.takewhile(lambda turn: turn < 30 or coordinator.opened < 12, range(300)):
        (asking,) = begin(client, 1)
        await asyncio.sleep(turn * 0.0002)
        for _ in range(turn % 7):
            await asyncio.sleep(0)
        asking.cancel()
        await asyncio.wait({asking})
    await until(lambda: len(coordinator.closed) == coordinator.opened)
    assert len(set(coordinator.closed)) == coordinator.opened > 10
