"""Test a device that follows offers while downloads run, drafts fail and disks are full. Its drafts have no model."""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from file_server import Behaviour, FileServer

from edge_agent.drafting.manager import DraftManager
from edge_agent.drafting.pool import NGRAM, DraftOptions, DraftPool
from edge_agent.releases.folder import ReleaseFolder
from edge_agent.releases.follower import OfferFollower, UpdateOptions
from edge_agent.releases.loader import RefusalLog, ReleaseLoader
from edge_agent.releases.updater import ReleaseUpdater
from outrider.artifacts import atomic_files
from outrider.core.errors import ModelRefused
from outrider.wire.manifest import Manifest, sign
from outrider.wire.ticket import Signer, Target
from outrider.wire.v1.coordinator_pb2 import OfferReleaseResponse

TARGET = Target("t", "sha256:" + "a" * 64, "sha256:" + "b" * 64)
SIGNER = Signer.generate()


class Pool(DraftPool):
    """Stand in for a draft pool without a model, and record whether it was closed."""

    def __init__(self, release: str) -> None:
        super().__init__(release[:4], DraftOptions(), release=release)
        self.closed = False

    @property
    def has_model(self) -> bool:
        return True

    async def warm_up(self) -> None:
        return

    async def close(self) -> None:
        self.closed = True


class Device:
    """Hold a release follower and the parts of a device that it works with."""

    def __init__(self, files: FileServer, folder: Path) -> None:
        self.files = files
        self.folder = ReleaseFolder.open(folder, TARGET.weights_hash)
        self.drafts = DraftManager(Pool(NGRAM))
        self.offer = OfferReleaseResponse(serial=0)
        self.asked = 0
        self.unusable: set[str] = set()
        """Digests of files that cannot be loaded."""
        self.refusals = RefusalLog()
        options = UpdateOptions({SIGNER.key_id: SIGNER.public_key}, folder)
        self.loader = ReleaseLoader(self.folder, self.load, self.refusals, options.keys)
        self.follower = OfferFollower(
            options, self._ask, TARGET, self.loader, self.refusals, self.drafts, lambda: Pool(NGRAM)
        )

    async def load(self, path: Path, name: str, digest: str) -> DraftPool:
        if digest in self.unusable:
            raise ModelRefused("it broke")
        return Pool(digest)

    async def _ask(self, *_: str) -> OfferReleaseResponse:
        self.asked += 1
        return self.offer

    def publish(self, version: int, *, canary: bool = False, announce: bool = True, usable: bool = True) -> str:
        """Let the cluster offer a release from now on, and return its name."""
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
        if announce:
            self.follower.notice(self.offer.serial)
        return digest

    @property
    def in_use(self) -> str:
        return self.drafts.pool.release if self.drafts.pool is not None else ""

    async def takes(self, version: int, *, canary: bool = False) -> str:
        digest = self.publish(version, canary=canary)
        await until(lambda: self.in_use == digest)
        return digest


@pytest.fixture
async def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Device]:
    monkeypatch.setattr("edge_agent.releases.follower.RETRY_FIRST_S", 0.05)
    monkeypatch.setattr("edge_agent.releases.follower.SPREAD_S", 0.0)
    async with FileServer() as files:
        device = Device(files, tmp_path)
        running = asyncio.create_task(device.follower.run())
        yield device
        running.cancel()
        await asyncio.wait({running})
        await device.drafts.close()
        device.folder.close()


async def until(condition: Callable[[], object], within_s: float = 10.0) -> None:
    give_up = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < give_up, "it did not come to that"
        await asyncio.sleep(0.005)


async def test_a_release_that_is_withdrawn_while_it_comes_is_not_waited_for(device: Device) -> None:
    device.files.behaviour = Behaviour(stall_after=10)
    device.publish(1, canary=True)
    await until(lambda: device.files.asked)
    device.files.behaviour = Behaviour()
    await device.takes(2)
    assert device.folder.state.last_good is None


async def test_a_file_that_cannot_be_loaded_leaves_the_draft_and_is_not_tried_again(device: Device) -> None:
    good = await device.takes(1)
    device.publish(2, usable=False)
    await until(lambda: device.refusals.by_kind["unusable"])
    device.follower.notice(device.offer.serial + 1)
    await until(lambda: device.refusals.by_kind["remembered"])
    state = device.folder.state
    assert device.in_use == good and state.current is not None and state.current.digest == good and state.floor == 1


async def test_a_canary_that_is_rolled_back_is_left_for_what_was_before(device: Device) -> None:
    good = await device.takes(1)
    await device.takes(2, canary=True)
    device.publish(1)
    await until(lambda: device.in_use == good)
    await device.takes(3, canary=True)
    device.offer = OfferReleaseResponse(serial=device.offer.serial + 1)  # nothing is offered any more
    device.follower.notice(device.offer.serial)
    await until(lambda: device.in_use == good)
    assert device.folder.state.floor == 1 and not device.refusals.by_kind


async def test_a_canary_is_left_although_what_is_offered_instead_was_refused_here(device: Device) -> None:
    device.publish(1, usable=False)
    await until(lambda: device.refusals.by_kind["unusable"])
    refused = device.offer
    await device.takes(2, canary=True)
    refused.serial = device.offer.serial + 1
    device.offer = refused
    device.follower.notice(device.offer.serial)
    await until(lambda: device.in_use == NGRAM)
    assert device.refusals.by_kind["remembered"] == 1


async def test_a_serial_that_nobody_has_or_that_went_back_does_not_make_it_deaf(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_agent.releases.follower._LOWER_SERIAL_S", 0.05)
    device.follower.notice((1 << 64) - 1)
    await until(lambda: device.asked >= 3)
    await device.takes(1)
    await until(lambda: device.follower._settled == device.follower._noticed == 1)
    device.offer = OfferReleaseResponse(serial=100)
    device.follower.notice(100)
    await until(lambda: device.follower._settled == 100)
    device.offer = OfferReleaseResponse(serial=2)
    await device.takes(2)


async def test_without_room_for_the_state_no_release_is_taken(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    good = await device.takes(1)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(atomic_files, "write", full)
        new = device.publish(2)
        await until(lambda: device.refusals.by_kind["no room"])
        assert device.in_use == good
    await until(lambda: device.in_use == new)


async def test_a_file_that_is_altered_each_time_is_left_until_there_is_news(device: Device) -> None:
    device.files.behaviour = Behaviour(flip=5)
    device.publish(1)
    await until(lambda: device.follower._settled == device.offer.serial)
    assert len(device.files.asked) == 2
    device.files.behaviour = Behaviour()
    await device.takes(2)


async def test_a_release_whose_publisher_is_not_trusted_any_more_is_not_loaded(device: Device) -> None:
    await device.takes(1)
    assert await ReleaseLoader(device.folder, device.load, device.refusals, ()).load_first() is None
    assert device.folder.state.current is None and device.folder.state.last_good is None


async def test_a_release_that_was_being_loaded_when_processes_ended_is_given_up_the_second_time(device: Device) -> None:
    good = await device.takes(1)
    await device.takes(2)
    for loads in (1, 2):
        device.folder.write(device.folder.state.loading())
        assert device.folder.state.loads == loads
        pool = await device.loader.load_first() if loads == 2 else None
    assert pool is not None and pool.release == good and device.refusals.by_kind["crashed"] == 1


async def test_a_client_beside_another_one_goes_on_with_updates_when_that_ends(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_agent.releases.updater._TAKE_OVER_S", 0.02)
    second = ReleaseUpdater(device.follower._options, device._ask)
    assert await second.begin(TARGET, device.load) is None  # nothing was loaded yet
    drafts = DraftManager(Pool(NGRAM))
    second.run(drafts, lambda: Pool(NGRAM))
    await device.takes(1)
    assert drafts.pool is not None and drafts.pool.release == NGRAM
    device.folder.close()
    new = device.publish(2, announce=False)
    second.notice(device.offer.serial)
    await until(lambda: drafts.pool is not None and drafts.pool.release == new)
    await second.close()
    await drafts.close()


async def test_a_draft_whose_loading_is_given_up_is_freed(device: Device) -> None:
    made: list[Pool] = []

    class Slow(Pool):
        async def warm_up(self) -> None:
            await asyncio.sleep(3600)

    async def load(path: Path, name: str, digest: str) -> DraftPool:
        made.append(Slow(digest))
        return made[-1]

    await device.takes(1)
    loading = asyncio.create_task(ReleaseLoader(device.folder, load, device.refusals, (SIGNER.key_id,)).load_current())
    await until(lambda: made)
    loading.cancel()
    await asyncio.wait({loading})
    assert made[0].closed
