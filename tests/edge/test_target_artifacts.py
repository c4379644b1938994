"""Test what a device fetches from its verifiers, over a route of several, and what it takes and keeps of that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from fake_coordinator import FakeCoordinator
from fake_verifier import FakeVerifier, Script, hash_of
from scripted import target

from edge_agent.session.channels import Channels
from edge_agent.session.coordinator_client import CoordinatorClient
from edge_agent.session.failover import Route
from edge_agent.target import artifacts
from edge_agent.target.artifacts import ArtifactClient, cached, digest
from outrider.artifacts.store import ArtifactStore
from outrider.core.backoff import Backoff
from outrider.core.errors import BadRequest, ModelRefused
from outrider.wire.v1 import coordinator_pb2, session_pb2

DATA = bytes(range(256)) * 40
HASH = hash_of(DATA)
DRAFT = session_pb2.Artifact(role="draft", name="draft.gguf", hash=HASH, size=len(DATA))


class Origin:
    """Send data in chunks, and note from where on it was asked for."""

    def __init__(self, data: bytes = DATA) -> None:
        self.data = data
        self.offsets: list[int] = []

    async def fetch(self, content_hash: str, offset: int) -> AsyncGenerator[bytes, None]:
        self.offsets.append(offset)
        for at in range(offset, len(self.data), 1000):
            yield self.data[at : at + 1000]


async def test_bytes_of_another_hash_are_refused_and_not_kept(tmp_path: Path) -> None:
    origin = Origin(bytes(reversed(DATA)))
    with pytest.raises(ModelRefused, match=r"draft\.gguf"):
        await cached(ArtifactStore(tmp_path), DRAFT, origin.fetch)
    assert origin.offsets == [0, 0]  # once more from the start: the first try may have been damaged on disk
    assert (await cached(ArtifactStore(tmp_path), DRAFT, Origin().fetch)).read_bytes() == DATA


async def test_a_directory_that_cannot_be_made_or_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    (tmp_path / "occupied" / f"{digest(DRAFT)}.partial").mkdir(parents=True)
    for root in (tmp_path / "file" / "cache", tmp_path / "occupied"):
        with pytest.raises(BadRequest, match=rf"{root}.*--cache-dir.*OUTRIDER_EDGE_CACHE_DIR") as caught:
            await cached(ArtifactStore(root), DRAFT, Origin().fetch)
        assert caught.value.field == "cache_dir"


@pytest.mark.parametrize("wrong", ["sha256:../../etc/passwd", "md5:abc", "sha256:" + "A" * 64, "", "0" * 64])
def test_a_hash_that_could_name_another_file_is_refused(wrong: str) -> None:
    with pytest.raises(BadRequest):
        digest(session_pb2.Artifact(role="draft", name="x", hash=wrong, size=1))


@pytest.mark.parametrize(
    ("role", "size"),
    [
        ("draft", 0),
        ("draft", 1 << 40),
        ("tokenizer", (256 << 20) + 1),
        ("template", (1 << 20) + 1),
        ("special_tokens", (1 << 20) + 1),
    ],
)
def test_an_empty_or_absurd_size_is_refused(role: str, size: int) -> None:
    with pytest.raises(BadRequest, match=role):
        digest(session_pb2.Artifact(role=role, name="x", hash=HASH, size=size))


# --- over a route


class World:
    """Hold two verifiers, a coordinator that names them, and what a device needs to reach them."""

    def __init__(self) -> None:
        self.one, self.two = (FakeVerifier(Script(target, artifacts={"draft": DATA}), name) for name in ("one", "two"))
        self.coordinator = FakeCoordinator(self.one, self.two)
        self.channels = Channels()

    async def library(self, budget_s: float = 5.0) -> ArtifactClient:
        """Return the client of a session that was placed."""
        calls = CoordinatorClient(self.channels, self.coordinator.address, asyncio.ensure_future)
        placement = await calls.open(coordinator_pb2.OpenSessionRequest())
        route = Route(placement, calls.resume, Backoff(budget_s, draw=lambda: 0.0))
        return ArtifactClient(route, self.channels)


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    monkeypatch.setattr(artifacts, "DESCRIBE_S", 0.5)
    monkeypatch.setattr(artifacts, "CHUNK_S", 0.5)
    made = World()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(made.channels.close)
        for running in (made.one, made.two, made.coordinator):
            await stack.enter_async_context(running)
        yield made


async def fetched(library: ArtifactClient, offset: int = 0) -> bytes:
    return b"".join([chunk async for chunk in library.fetch(HASH, offset)])


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
    assert resumed == [(HASH, 3000)]


async def test_the_coordinator_is_asked_again_where_every_verifier_is_gone(world: World) -> None:
    world.coordinator.verifiers = (world.one,)
    world.coordinator.after_resume = (world.two,)
    library = await world.library()
    await world.one.kill()
    await library.describe()
    assert world.coordinator.resumed == [("one",)]


async def test_a_verifier_that_stands_alone_is_asked_again_when_it_is_back(world: World) -> None:
    address = world.one.address
    library = ArtifactClient(Route.direct(address, Backoff(5.0)), world.channels)
    stream = library.fetch(HASH, 0)
    begin = await anext(stream)
    await world.one.kill()
    await world.one.start(address)
    assert begin + b"".join([chunk async for chunk in stream]) == DATA
