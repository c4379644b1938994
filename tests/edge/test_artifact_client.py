"""Test Describe and FetchArtifact over a route: if one verifier fails to send something, another one sends it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import pytest
from fake_coordinator import FakeCoordinator
from fake_verifier import FakeVerifier, Script, hash_of
from scripted import target

from edge_agent.session.coordinator_client import CoordinatorClient, grants_of
from edge_agent.session.failover import DirectRoute, GrantRoute
from edge_agent.session.stream import Channels
from edge_agent.target.artifacts import ArtifactClient
from outrider.core.backoff import Backoff
from outrider.wire.v1 import coordinator_pb2 as pb

DATA = bytes(range(256)) * 40


class World:
    """Hold two verifiers, a coordinator that names them, and what a device needs to reach them."""

    def __init__(self) -> None:
        self.one, self.two = (FakeVerifier(Script(target, artifacts={"draft": DATA}), name) for name in ("one", "two"))
        self.coordinator = FakeCoordinator(self.one, self.two)
        self.channels = Channels(None, insecure=False)

    async def library(self, budget_s: float = 5.0) -> ArtifactClient:
        """Return the client of a session that was placed, with short timeouts."""
        calls = CoordinatorClient(
            lambda: self.channels.get(self.coordinator.address, tls=False), None, asyncio.ensure_future
        )
        placement = await calls.open("")

        async def resume(ticket: bytes, failed: Sequence[str], last_epoch: int) -> Sequence[pb.Grant]:
            return await calls.resume(placement.session_id, ticket, failed, last_epoch)

        route = GrantRoute(grants_of(placement), resume, Backoff(budget_s, draw=lambda: 0.0))
        return ArtifactClient(
            route, lambda attach: self.channels.get(attach.address, tls=False, bulk=True), describe_s=0.5, chunk_s=0.5
        )


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(made.channels.close)
        for running in (made.one, made.two, made.coordinator):
            await stack.enter_async_context(running)
        yield made


async def fetched(library: ArtifactClient, offset: int = 0) -> bytes:
    return b"".join([chunk async for chunk in library.fetch(hash_of(DATA), offset)])


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_download_goes_on_at_the_standby_where_it_broke_off(world: World, *, hangs: bool) -> None:
    if hangs:
        world.one.script.freeze_after = 3
    else:
        world.one.script.break_after = 3
    library = await world.library()
    await library.describe()
    assert await fetched(library) == DATA
    resumed = world.two.fetches if hangs else world.one.fetches[1:]  # a stream that broke is tried here once more
    assert resumed == [(hash_of(DATA), 3000)]


async def test_the_coordinator_is_asked_again_where_every_verifier_is_gone(world: World) -> None:
    world.coordinator.verifiers = (world.one,)
    world.coordinator.after_resume = (world.two,)
    library = await world.library()
    await world.one.kill()
    await library.describe()
    assert world.coordinator.resumed == [("one",)]


async def test_a_verifier_that_stands_alone_is_asked_again_when_it_is_back(world: World) -> None:
    address = world.one.address
    library = ArtifactClient(
        DirectRoute(address, Backoff(5.0)), lambda attach: world.channels.get(attach.address, tls=False)
    )
    stream = library.fetch(hash_of(DATA), 0)
    begin = await anext(stream)
    await world.one.kill()
    await world.one.start(address)
    assert begin + b"".join([chunk async for chunk in stream]) == DATA
