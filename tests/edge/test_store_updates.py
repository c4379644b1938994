"""Test a client whose n-gram store is replaced while its sessions run: nothing is lost and nothing bad accepted."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import pytest
from fake_coordinator import FakeCoordinator
from fake_verifier import FakeVerifier, Script
from file_server import FileServer
from publisher import Publisher
from scripted import continuation, target, tokenizer_json

from edge_agent import AsyncClient, EdgeSettings
from edge_agent.drafting.health import WINDOW
from edge_agent.drafting.stores import LoadedStore
from edge_agent.releases.updater import ReleaseUpdater
from edge_agent.target.tokenizer import TargetTokenizer
from outrider.artifacts.ngram_store import NgramStore
from outrider.core.ngram import NgramTable
from outrider.core.telemetry import release_name
from outrider.wire.manifest import Manifest, sign
from outrider.wire.v1 import coordinator_pb2 as pb

PROMPT = [1, 2, 3]
TOKENS = 400


@pytest.fixture
async def verifier() -> AsyncIterator[FakeVerifier]:
    table = TargetTokenizer(tokenizer_json()).table
    script = Script(target, step_s=0.005, vocabulary_size=len(table), tokenizer_json=tokenizer_json())
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
    """Hold a cluster, a publisher of stores, and clients of one device, which draft by n-grams."""

    def __init__(
        self, verifier: FakeVerifier, coordinator: FakeCoordinator, publisher: Publisher, folder: Path
    ) -> None:
        self.verifier = verifier
        self.coordinator = coordinator
        self.publisher = publisher
        self.folder = folder

    def client(self, api_key: str | None = None, draft: str = "ngram") -> AsyncClient:
        key = self.publisher.signer.public_key.hex()
        return AsyncClient(
            coordinator=self.coordinator.address,
            cache_dir=self.folder / "cache",
            draft=draft,
            api_key=api_key,
            settings=EdgeSettings(release_stall_s=0.5, release_keys=key, release_spread_s=0.0),
        )

    def store(self, text: Sequence[int], **changes: object) -> bytes:
        """Return the file of a store that knows a text."""
        known = self.publisher.manifest(b"", 1)
        table = NgramTable.build([text, text], least_sequences=2)
        made = NgramStore(table, known.weights_hash, known.tokenizer_hash, "acme", 2, 2)
        dataclasses.replace(made, **changes).save(self.folder / "store")  # type: ignore[arg-type]
        return (self.folder / "store").read_bytes()

    def publish(self, version: int, data: bytes, *, canary: bool = False, tenant: str = "acme") -> str:
        """Offer a store to every device, announce it to sessions, and return its digest."""
        manifest: Manifest = dataclasses.replace(
            self.publisher.manifest(data, version), tenant=tenant, quantization="NGRAM"
        )
        self.publisher.files.files[f"artifacts/{manifest.digest}.safetensors"] = data
        self.publisher.serial += 1
        self.coordinator.store_offer = pb.OfferReleaseResponse(
            serial=self.publisher.serial,
            manifest=sign(manifest, self.publisher.signer),
            canary=canary,
            base_url=self.publisher.files.url,
        )
        self.verifier.announce_releases(self.publisher.serial)
        return manifest.digest


@pytest.fixture
def world(verifier: FakeVerifier, coordinator: FakeCoordinator, publisher: Publisher, tmp_path: Path) -> World:
    return World(verifier, coordinator, publisher, tmp_path)


def updates(client: AsyncClient) -> ReleaseUpdater[LoadedStore]:
    assert client.store_updates is not None
    return client.store_updates


def in_use(client: AsyncClient) -> str:
    return client._draft_options.stores.release


async def until(condition: Callable[[], object], within_s: float = 15.0) -> None:
    give_up = asyncio.get_running_loop().time() + within_s
    while not condition():
        assert asyncio.get_running_loop().time() < give_up, "it did not come to that"
        await asyncio.sleep(0.01)


async def test_a_live_session_drafts_with_a_new_store_and_loses_nothing(world: World) -> None:
    expected = continuation(PROMPT, TOKENS)
    async with world.client() as client:
        stream = await client.stream(PROMPT, max_tokens=TOKENS)
        running = asyncio.create_task(stream.drain())
        await until(lambda: stream.statistics.tokens > 20)
        assert stream.statistics.release == "ngram"
        digest = world.publish(1, world.store([*PROMPT, *expected]))
        label = release_name("ngram", digest)
        await until(lambda: stream.statistics.release == label)
        completion = await running
        assert list(completion.token_ids) == expected
        assert completion.statistics.attaches == 1
        assert [release for _, _, release in world.verifier.in_use] == [label]
        again = await client.generate(PROMPT, max_tokens=TOKENS)
        assert list(again.token_ids) == expected
        assert world.coordinator.asked[-1].draft_release == label
        # The target's next tokens cannot be told from its text, but from the store.
        assert again.statistics.accepted > 0.5 * TOKENS


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("unusable", None),
        ("unusable", {"weights_hash": "another"}),
        ("unusable", {"tokenizer_hash": "another"}),
        ("unusable", {"tenant": "another"}),
        ("manifest", {}),
    ],
)
async def test_what_is_no_store_of_this_target_is_refused_and_sessions_go_on(
    kind: str, changes: dict[str, str] | None, world: World
) -> None:
    data = world.store([1, 2, 3], **changes) if changes is not None else b"\xff" * 500
    async with world.client() as client:
        await client.prepare()
        world.publish(1, data, tenant="" if kind == "manifest" else "acme")
        updates(client).notice(1)
        await until(lambda: updates(client).refused)
        assert dict(updates(client).refused) == {kind: 1} and in_use(client) == ""
        assert list((await client.generate(PROMPT, max_tokens=50)).token_ids) == continuation(PROMPT, 50)


async def test_a_store_that_proved_itself_is_used_at_the_next_start(world: World) -> None:
    expected = continuation(PROMPT, TOKENS)
    digest = world.publish(1, world.store([*PROMPT, *expected]))
    async with world.client() as client:
        await client.prepare()
        updates(client).notice(1)
        await until(lambda: in_use(client) == digest)
        while updates(client).on_trial:
            assert list((await client.generate(PROMPT, max_tokens=WINDOW)).token_ids) == expected[:WINDOW]
            await asyncio.sleep(0.05)
        assert updates(client).floor == 1
    world.coordinator.store_offer = pb.OfferReleaseResponse()
    async with world.client() as client:
        await client.prepare()
        assert in_use(client) == digest
        assert (await client.generate(PROMPT, max_tokens=TOKENS)).statistics.accepted > 0.5 * TOKENS


async def test_a_store_on_this_device_is_not_used_for_another_tenant(world: World) -> None:
    digest = world.publish(1, world.store([1, 2, 3]))
    async with world.client("a" * 24) as client:
        await client.prepare()
        updates(client).notice(1)
        await until(lambda: in_use(client) == digest)
    world.coordinator.store_offer = pb.OfferReleaseResponse(serial=9)
    async with world.client("b" * 24) as other:
        await other.generate(PROMPT, max_tokens=20)
        assert in_use(other) == ""


async def test_a_store_with_which_proposals_are_worse_is_given_up(world: World) -> None:
    # A target that repeats itself: its own text predicts it, and a store that is sure of something else does not.
    cycle = [5, 6, 7, 8, 9]
    world.verifier.script.target = lambda sequence: cycle[len(sequence) % len(cycle)]
    runs = [[cycle[(first + i) % len(cycle)] for i in range(6)] for first in range(len(cycle))]
    wrong = [token for run in runs for _ in range(400) for token in (*run, 11 + run[0])]
    async with world.client() as client:
        first = await client.generate(PROMPT, max_tokens=TOKENS)
        digest = world.publish(1, world.store(wrong), canary=True)
        updates(client).notice(1)
        await until(lambda: in_use(client) == digest)
        for _ in range(20):
            again = await client.generate(PROMPT, max_tokens=TOKENS)
            assert again.token_ids == first.token_ids
            if updates(client).refused:
                break
        assert dict(updates(client).refused) == {"worse": 1} and in_use(client) == ""


async def test_a_withdrawn_store_is_not_used_any_more(world: World) -> None:
    digest = world.publish(1, world.store([1, 2, 3]), canary=True)
    async with world.client() as client:
        await client.prepare()
        updates(client).notice(1)
        await until(lambda: in_use(client) == digest)
        world.coordinator.store_offer = pb.OfferReleaseResponse(serial=2)
        updates(client).notice(2)
        await until(lambda: in_use(client) == "")
    assert hashlib.sha256(world.store([1, 2, 3])).hexdigest() == digest


async def test_sessions_are_opened_with_the_ids_by_which_releases_are_offered(world: World) -> None:
    for draft in ("ngram", "auto"):
        world.coordinator.offers.clear()
        world.coordinator.store_offers.clear()
        async with world.client(draft=draft) as client:
            await client.generate(PROMPT, max_tokens=5)
            world.publish(1, world.store([*PROMPT, *continuation(PROMPT, TOKENS)]))
            await client.generate(PROMPT, max_tokens=5)
            await until(lambda: world.coordinator.store_offers)
            await until(lambda auto=draft == "auto": bool(world.coordinator.offers) or not auto)
        opened, [store, *_] = world.coordinator.asked[-1], world.coordinator.store_offers
        assert opened.store_device_id == store.device_id != ""
        if draft == "auto":
            assert opened.device_id == world.coordinator.offers[-1].device_id != ""
            assert opened.device_id != opened.store_device_id
        else:
            assert opened.device_id == ""
