"""Test a device that follows offers while downloads run, drafts fail and disks are full. Its drafts have no model."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from fake_verifier import FakeVerifier
from file_server import Behaviour, FileServer

from edge_agent import AsyncClient, EdgeSettings
from edge_agent.drafting.loading import NGRAM, Draft
from edge_agent.drafting.pool import DraftPool
from edge_agent.releases.download import RefusalKind
from edge_agent.releases.follower import Follower
from edge_agent.releases.state import FOLDER, ReleaseFolder, ReleaseState
from outrider.artifacts import atomic_files
from outrider.core.errors import ModelRefused, VocabularyMismatch
from outrider.wire.manifest import sign
from outrider.wire.ticket import Signer
from outrider.wire.v1.coordinator_pb2 import Manifest, OfferReleaseResponse
from outrider.wire.v1.session_pb2 import TargetIdentity

TARGET = TargetIdentity(name="t", weights_hash="sha256:" + "a" * 64, tokenizer_hash="sha256:" + "b" * 64)
SIGNER = Signer.generate()


class Loaded(Draft):
    """Stand in for a draft with a model, and record whether it was freed."""

    def __init__(self, release: str) -> None:
        super().__init__(release[:4], release)
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Cluster:
    """Hold what a cluster offers, and the devices that follow it."""

    def __init__(self, files: FileServer, root: Path) -> None:
        self.files = files
        self.root = root
        self.offer = OfferReleaseResponse(serial=0)
        self.asked = 0
        self.unusable: set[str] = set()
        """Digests of files that cannot be loaded."""
        self.error: ModelRefused = ModelRefused("it broke")

    async def load(self, path: Path, name: str, digest: str) -> Draft:
        if digest in self.unusable:
            raise self.error
        return Loaded(digest)

    async def ask(self, _: object) -> OfferReleaseResponse:
        self.asked += 1
        return self.offer

    def publish(self, version: int, *, canary: bool = False, usable: bool = True) -> str:
        """Offer a release from now on, and return its name."""
        data = f"draft {version}".encode() * 1000
        digest = hashlib.sha256(data).hexdigest()
        self.files.files[f"artifacts/{digest}.gguf"] = data
        if not usable:
            self.unusable.add(digest)
        manifest = Manifest(
            version=version,
            weights_hash=TARGET.weights_hash,
            tokenizer_hash=TARGET.tokenizer_hash,
            artifact=f"sha256:{digest}",
            size=len(data),
            quantization="Q8_0",
        )
        self.offer = OfferReleaseResponse(
            serial=self.offer.serial + 1, manifest=sign(manifest, SIGNER), canary=canary, base_url=self.files.url
        )
        return digest


class Device:
    """Hold a client's follower and its drafts."""

    def __init__(self, cluster: Cluster, trusted: Signer = SIGNER) -> None:
        self.cluster = cluster
        self.drafts = DraftPool(2)
        self.follower = Follower({trusted.key_id: trusted.public_key}, cluster.root, cluster.ask, self.drafts)

    async def start(self) -> None:
        self.drafts.replace(await self.follower.begin(TARGET, self.cluster.load) or self.drafts.ngram)
        self.follower.run()

    async def end(self) -> None:
        await self.follower.close()
        await self.drafts.close()

    def publish(self, version: int, *, canary: bool = False, usable: bool = True) -> str:
        digest = self.cluster.publish(version, canary=canary, usable=usable)
        self.follower.notice(self.cluster.offer.serial)
        return digest

    def offer(self, offer: OfferReleaseResponse) -> None:
        """Offer something else, an empty one for nothing."""
        offer.serial = self.cluster.offer.serial + 1
        self.cluster.offer = offer
        self.follower.notice(offer.serial)

    async def takes(self, version: int, *, canary: bool = False) -> str:
        digest = self.publish(version, canary=canary)
        await until(lambda: self.in_use == digest)
        return digest

    @property
    def in_use(self) -> str:
        return self.drafts.draft.release if self.drafts.draft is not None else ""

    @property
    def state(self) -> ReleaseState:
        return ReleaseFolder(self.cluster.root, TARGET.weights_hash).state


@pytest.fixture
async def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Cluster]:
    monkeypatch.setattr("edge_agent.releases.follower.RETRY_FIRST_S", 0.05)
    monkeypatch.setattr("edge_agent.releases.follower.SPREAD_S", 0.0)
    async with FileServer() as files:
        yield Cluster(files, tmp_path / FOLDER)


@pytest.fixture
async def device(cluster: Cluster) -> AsyncIterator[Device]:
    device = Device(cluster)
    await device.start()
    await until(lambda: cluster.asked)
    yield device
    await device.end()


async def until(condition: Callable[[], object], within_s: float = 60.0) -> None:
    give_up = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up, "it did not come to that"
        await asyncio.sleep(0.005)


async def test_a_release_that_is_withdrawn_while_it_comes_is_not_waited_for(device: Device) -> None:
    device.cluster.files.behaviour = Behaviour(stall_after=10)
    device.publish(1, canary=True)
    await until(lambda: device.cluster.files.asked)
    device.cluster.files.behaviour = Behaviour()
    await device.takes(2)
    assert device.state.last_good is None


@pytest.mark.parametrize(
    ("error", "kind"), [(ModelRefused("it broke"), "unusable"), (VocabularyMismatch("other tokens"), "vocabulary")]
)
async def test_a_file_that_cannot_be_loaded_leaves_the_draft_and_is_not_tried_again_by_this_process(
    device: Device, error: ModelRefused, kind: RefusalKind
) -> None:
    good = await device.takes(1)
    device.cluster.error = error
    bad = device.publish(2, usable=False)
    await until(lambda: device.follower.refused[kind])
    asked = device.cluster.asked
    device.cluster.unusable.clear()
    device.offer(device.cluster.offer)
    await until(lambda: device.cluster.asked > asked and not device.follower._news.is_set())
    state = device.state
    assert device.in_use == good and state.current is not None and state.current.digest == good and state.floor == 1
    assert device.follower.refused == {kind: 1}
    await device.end()
    again = Device(device.cluster)
    await again.start()
    await until(lambda: again.in_use == bad)
    await again.end()


async def test_a_replaced_draft_is_freed(device: Device) -> None:
    await device.takes(1)
    old = device.drafts.draft
    await device.takes(2)
    await until(lambda: isinstance(old, Loaded) and old.closed)


async def test_with_publishers_to_trust_the_unsigned_draft_of_a_verifier_is_neither_fetched_nor_loaded(
    verifier: FakeVerifier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = EdgeSettings(release_keys=SIGNER.public_key.hex())
    async with AsyncClient(verifier=verifier.address, cache_dir=tmp_path, settings=settings) as client:
        completion = await client.generate("x", max_tokens=20)
    assert completion.statistics.draft == NGRAM
    draft = hashlib.sha256(verifier.script.artifacts["draft"]).hexdigest()
    assert f"sha256:{draft}" not in [name for name, _ in verifier.fetches]
    assert "no publisher has signed it and release keys are set" in caplog.text


async def test_a_canary_is_left_although_what_is_offered_instead_was_refused_here(device: Device) -> None:
    device.publish(1, usable=False)
    await until(lambda: device.follower.refused["unusable"])
    refused = device.cluster.offer
    await device.takes(2, canary=True)
    device.offer(refused)
    await until(lambda: device.in_use == NGRAM)
    assert device.follower.refused == {"unusable": 1}


async def test_a_serial_that_nobody_has_or_that_went_back_does_not_make_it_deaf(device: Device) -> None:
    asked = device.cluster.asked
    device.follower.notice((1 << 64) - 1)
    await until(lambda: device.cluster.asked > asked)
    await device.takes(1)
    device.cluster.offer.serial = 100
    device.follower.notice(100)
    await until(lambda: device.follower._serial == 100)
    device.cluster.offer = OfferReleaseResponse(serial=2)  # as after the loss of the coordinator's store
    await device.takes(2)


async def test_without_room_for_the_state_a_release_is_taken_for_as_long_as_the_process_lives(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    good = await device.takes(1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(atomic_files, "write", full)
        await device.takes(2)
        await until(lambda: "cannot be written" in caplog.text)
    assert device.state.current is not None and device.state.current.digest == good


async def test_a_file_that_is_altered_each_time_is_left_until_there_is_news(device: Device) -> None:
    device.cluster.files.behaviour = Behaviour(flip=5)
    device.publish(1)
    await until(lambda: device.follower.refused["altered"])
    assert len(device.cluster.files.asked) == 2
    device.cluster.files.behaviour = Behaviour()
    await device.takes(2)
    assert len(device.cluster.files.asked) == 3


@pytest.mark.parametrize("fault", ["", "new unusable", "new damaged", "all unusable", "distrusted"])
async def test_a_start_loads_the_last_release_that_is_trusted_whole_and_usable(
    device: Device, cluster: Cluster, fault: str
) -> None:
    good, new = await device.takes(1), await device.takes(2)
    cluster.offer = OfferReleaseResponse(serial=cluster.offer.serial)
    await device.end()
    if "unusable" in fault:
        cluster.unusable = {new} if "new" in fault else {new, good}
    if "damaged" in fault:
        next(cluster.root.glob(f"*/{new}.gguf")).write_bytes(b"damaged")
    again = Device(cluster, Signer.generate() if fault == "distrusted" else SIGNER)
    await again.start()
    assert again.in_use == (new if not fault else good if "new" in fault else NGRAM)
    assert again.follower.refused["unusable"] == len(cluster.unusable)
    assert (again.state.current is not None) == (again.in_use != NGRAM)
    await again.end()


async def test_a_client_beside_another_one_is_the_same_device_and_takes_what_that_has_downloaded(
    device: Device, cluster: Cluster
) -> None:
    first = await device.takes(1)
    second = Device(cluster)
    await second.start()
    assert second.in_use == first and second.follower.device_id == device.follower.device_id
    await until(lambda: second.follower._serial == cluster.offer.serial)
    new = await device.takes(2)
    second.follower.notice(cluster.offer.serial)
    await until(lambda: second.in_use == new)
    assert len(cluster.files.asked) == 2
    await second.end()


async def test_a_canary_that_is_withdrawn_is_left_by_every_process(device: Device, cluster: Cluster) -> None:
    canary = await device.takes(1, canary=True)
    second = Device(cluster)
    await second.start()
    await until(lambda: second.in_use == canary and second.follower._serial == cluster.offer.serial)
    device.offer(OfferReleaseResponse())
    await until(lambda: device.in_use == NGRAM)
    second.follower.notice(cluster.offer.serial)
    await until(lambda: second.in_use == NGRAM)
    await second.end()


async def test_a_draft_whose_loading_is_given_up_is_freed(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Loaded] = []

    async def load(path: Path, name: str, digest: str) -> Draft:
        made.append(Loaded(digest))
        return made[0]

    async def slowly(draft: Draft) -> None:
        await asyncio.sleep(3600)

    monkeypatch.setattr(device.follower, "_load", load)
    monkeypatch.setattr(device.drafts, "start", slowly)
    device.publish(1)
    await until(lambda: made)
    await device.follower.close()
    assert made[0].closed
