"""Test a client whose draft is replaced while its sessions run: nothing is lost and nothing bad accepted."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from fake_coordinator import FakeCoordinator
from fake_verifier import FakeVerifier, Script
from file_server import FileServer
from publisher import Publisher
from scripted import continuation, target, tokenizer_json

from edge_agent import AsyncClient, Completion, CompletionStream, EdgeSettings
from edge_agent.cli import parser
from edge_agent.drafting.pool import NGRAM
from edge_agent.releases.follower import Follower
from edge_agent.releases.state import FOLDER, InstalledRelease, ReleaseFolder
from edge_agent.target.tokenizer import TargetTokenizer
from outrider.core.errors import BadRequest

PROMPT = [1, 2, 3]
TOKENS = 480
"""As many tokens as the draft's context of 512 can follow."""


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_agent.releases.follower.SPREAD_S", 0.0)


@pytest.fixture
def own(tiny_gguf: Path) -> bytes:
    """Return the draft that comes with the verifier, as the bytes of a GGUF."""
    return tiny_gguf.read_bytes()


@pytest.fixture
async def verifier(own: bytes) -> AsyncIterator[FakeVerifier]:
    script = Script(
        target,
        step_s=0.012,
        vocabulary_size=len(TargetTokenizer(tokenizer_json()).table),
        tokenizer_json=tokenizer_json(),
        artifacts={"draft": own},
        chunk_bytes=100_000,
    )
    async with FakeVerifier(script) as running:
        yield running


@pytest.fixture
async def coordinator(verifier: FakeVerifier) -> AsyncIterator[FakeCoordinator]:
    async with FakeCoordinator(verifier) as running:
        yield running


@pytest.fixture
async def publisher(tmp_path: Path) -> AsyncIterator[Publisher]:
    async with FileServer() as files:
        yield Publisher(files, tmp_path, tokenizer_json())


class World:
    """Hold a cluster, a publisher, and clients of one device."""

    def __init__(self, verifier: FakeVerifier, coordinator: FakeCoordinator, publisher: Publisher, cache: Path) -> None:
        self.verifier = verifier
        self.coordinator = coordinator
        self.publisher = publisher
        self.cache = cache
        self.own = hashlib.sha256(verifier.script.artifacts["draft"]).hexdigest()

    def client(self, **settings: object) -> AsyncClient:
        given = {"release_keys": self.publisher.signer.public_key.hex(), **settings}
        return AsyncClient(
            coordinator=self.coordinator.address,
            cache_dir=self.cache,
            settings=EdgeSettings(**given),  # type: ignore[arg-type]
        )

    def install_stable(self) -> None:
        """Install a release on the device that it has found healthy: the verifier's draft, signed as version 1."""
        folder = ReleaseFolder.open(self.cache / FOLDER, "w")
        folder.files.path(self.own).write_bytes(self.verifier.script.artifacts["draft"])
        release = InstalledRelease(
            digest=self.own, version=1, canary=False, manifest="0" * 64, key_id=self.publisher.signer.key_id
        )
        folder.write(folder.state.take(release))
        folder.close()

    def hurry(self) -> None:
        """Let the rest of a session take no time, once the event that the test waits for has happened."""
        self.verifier.script.step_s = 0.0005

    def publish(self, version: int) -> str:
        """Publish a new draft for everybody, announce it to sessions, and return its name."""
        manifest = self.publisher.offer(self.coordinator, self.publisher.draft(version), version)
        self.verifier.announce_releases(self.coordinator.offer.serial)
        return manifest.digest


@pytest.fixture
def bare(verifier: FakeVerifier, coordinator: FakeCoordinator, publisher: Publisher, tmp_path: Path) -> World:
    """Return a world whose device has no release yet."""
    return World(verifier, coordinator, publisher, tmp_path / "cache")


@pytest.fixture
def world(bare: World) -> World:
    """Return a world whose device has a signed release, which it goes back to."""
    bare.install_stable()
    return bare


def updates(client: AsyncClient) -> Follower:
    assert client.updates is not None
    return client.updates


async def release_of(client: AsyncClient) -> str:
    drafts = (await client.prepare()).drafts
    return drafts.release if drafts is not None else ""


def in_use(client: AsyncClient) -> str:
    pool = client._sessions.drafts.pool
    return pool.release if pool is not None else ""


async def until(condition: Callable[[], object], within_s: float = 15.0) -> None:
    give_up = asyncio.get_running_loop().time() + within_s
    while not condition():
        assert asyncio.get_running_loop().time() < give_up, "it did not come to that"
        await asyncio.sleep(0.01)


async def begun(client: AsyncClient, tokens: int = TOKENS) -> tuple[CompletionStream, asyncio.Task[Completion]]:
    """Return a session that runs, with some tokens delivered."""
    stream = await client.stream(PROMPT, max_tokens=tokens)
    running = asyncio.create_task(stream.drain())
    await until(lambda: stream.statistics.tokens > 20)
    return stream, running


async def test_a_live_session_goes_on_with_the_new_draft_and_loses_nothing(world: World) -> None:
    async with world.client() as client:
        stream, running = await begun(client)
        old = (await client.prepare()).drafts
        assert old is not None and stream.statistics.release == world.own
        new = world.publish(1)
        await until(lambda: stream.statistics.release == new)
        at = stream.statistics.tokens
        world.hurry()
        completion = await running
        assert at < TOKENS
        assert list(completion.token_ids) == continuation(PROMPT, TOKENS)
        statistics = completion.statistics
        assert statistics.attaches == 1 and len(statistics.swaps_s) == 1
        assert 0.0 <= statistics.swaps_s[0] < 2.0
        assert [release for _, _, release in world.verifier.in_use] == [new]
        assert await release_of(client) == new
        assert f"(release {new[:12]})" in statistics.summary() and "replaced 1 times" in statistics.summary()
        await until(lambda: old._models[0].model._closed)  # freed once nobody has it
        await client.generate(PROMPT, max_tokens=5)
        assert world.coordinator.asked[-1].draft_release == new
    assert {request.in_use for request in world.coordinator.offers} == {world.own}


@pytest.mark.parametrize("through", ["coordinator", "verifier"])
async def test_with_publishers_to_trust_the_unsigned_draft_of_a_verifier_is_neither_fetched_nor_loaded(
    bare: World, through: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = EdgeSettings(release_keys=bare.publisher.signer.public_key.hex())
    address = {through: bare.coordinator.address if through == "coordinator" else bare.verifier.address}
    with caplog.at_level(logging.WARNING):
        async with AsyncClient(**address, cache_dir=bare.cache, settings=settings) as client:  # type: ignore[arg-type]
            completion = await client.generate(PROMPT, max_tokens=20)
    assert list(completion.token_ids) == continuation(PROMPT, 20)
    assert completion.statistics.draft == NGRAM
    assert bare.own not in [name.removeprefix("sha256:") for name, _ in bare.verifier.fetches]
    assert "no publisher has signed it and release keys are set" in caplog.text


def _no_model(world: World) -> None:
    data = b"GGUF" + b"no model at all" * 1000
    world.publisher.offer(world.coordinator, data, 1)
    world.verifier.announce_releases(world.coordinator.offer.serial)


def _aborting(world: World) -> None:
    """Publish a file, rightly signed, at whose header llama.cpp ends the whole process."""
    import tiny_gguf

    data = tiny_gguf.write_tiny_llama(world.cache / "aborting.gguf", rope=15).read_bytes()
    world.publisher.offer(world.coordinator, data, 1)
    world.verifier.announce_releases(world.coordinator.offer.serial)


@pytest.mark.parametrize(
    ("publish", "kind", "said"),
    [
        (_no_model, "unusable", "cannot be loaded"),
        (_aborting, "unusable", "no token can be decoded with it"),
    ],
    ids=["no model", "aborts llama.cpp"],
)
async def test_a_bad_release_is_refused_by_name_and_the_session_goes_on_undisturbed(
    world: World,
    publish: Callable[[World], None],
    kind: str,
    said: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with world.client() as client:
        _, running = await begun(client, 150)
        with caplog.at_level(logging.WARNING):
            publish(world)
            await until(lambda: updates(client).refused)
        assert dict(updates(client).refused) == {kind: 1}
        assert f"({kind})" in caplog.text and said in caplog.text
        world.hurry()
        completion = await running
        assert list(completion.token_ids) == continuation(PROMPT, 150)
        assert completion.statistics.release == world.own and not completion.statistics.swaps_s
        assert await release_of(client) == world.own


async def test_a_draft_of_another_vocabulary_is_refused_although_its_manifest_says_otherwise(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    import tiny_gguf

    spelt = tiny_gguf.vocabulary()
    swapped = [spelt[0][1], spelt[0][0], *spelt[0][2:]]
    monkeypatch.setattr(tiny_gguf, "vocabulary", lambda: (swapped, spelt[1]))
    async with world.client() as client:
        await client.prepare()
        world.publish(1)
        await client.generate(PROMPT, max_tokens=20)
        await until(lambda: updates(client).refused)
        assert dict(updates(client).refused) == {"vocabulary": 1}
        assert await release_of(client) == world.own


async def test_the_command_line_shows_what_is_remembered_and_forgets_refusals(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    async def said(verb: str) -> str:
        args = parser().parse_args(["releases", verb, "--cache-dir", str(world.cache)])
        await args.run(args)
        return capsys.readouterr().out

    async with world.client() as client:
        await client.prepare()
        with pytest.raises(BadRequest, match="end it first"):
            await said("forget")
    assert f"in use     {world.own[:12]} (version 1, stable)" in await said("status")
    folder = ReleaseFolder.open(world.cache / FOLDER, "w")
    current = folder.state.current
    assert current is not None
    folder.write(folder.state.refuse(current, "unusable", "bad", 1.0))
    folder.close()
    assert "unusable: bad" in await said("status")
    assert "1 refused release forgotten" in await said("forget")
    assert "bad" not in await said("status")
