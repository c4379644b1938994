"""Test a device that follows offers while downloads run, drafts fail and disks are full. Its drafts have no model."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from file_server import Behaviour, FileServer

from edge_agent.drafting.health import WINDOW, DraftHealth, FirstAcceptance
from edge_agent.drafting.manager import DraftManager
from edge_agent.drafting.pool import NGRAM, DraftOptions, DraftPool, LoadedModel
from edge_agent.releases import trials
from edge_agent.releases.folder import ReleaseFolder
from edge_agent.releases.follower import OfferFollower, UpdateOptions
from edge_agent.releases.loader import RefusalLog, ReleaseLoader
from edge_agent.releases.state import ReleaseState
from edge_agent.releases.trials import ReleaseTrials
from edge_agent.releases.updater import ReleaseUpdater
from edge_agent.session.coordinator_client import ReleaseOffer
from outrider.artifacts import atomic_files
from outrider.wire.manifest import Manifest, sign
from outrider.wire.ticket import Signer, Target

TARGET = Target("t", "sha256:" + "a" * 64, "sha256:" + "b" * 64)
SIGNER = Signer.generate()


class Pool(DraftPool):
    """Stand in for a draft pool without a model, and record whether it was closed."""

    def __init__(self, release: str, health: DraftHealth | None = None) -> None:
        super().__init__(release[:4], DraftOptions(), release=release, health=health)
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
        self.offer = ReleaseOffer(0)
        self.asked = 0
        self.refusals = RefusalLog()
        options = UpdateOptions({SIGNER.key_id: SIGNER.public_key}, 1 << 20, folder, stall_s=20.0, spread_s=0.0)
        loader = ReleaseLoader(self.folder, self._load, self.refusals, options.keys)
        self.trials = ReleaseTrials(loader, self.drafts, lambda: Pool(NGRAM))
        self.follower = OfferFollower(options, self._ask, TARGET, loader, self.refusals, self.trials)

    async def _load(self, path: Path, name: str, digest: str, health: DraftHealth) -> DraftPool:
        return Pool(digest, health)

    async def _ask(self, *_: str) -> ReleaseOffer:
        self.asked += 1
        return self.offer

    def publish(self, version: int, *, canary: bool = False, announce: bool = True, size: int = 0) -> str:
        """Let the cluster offer a release from now on, and return its name."""
        data = f"draft {version}".encode() * 1000
        digest = hashlib.sha256(data).hexdigest()
        self.files.files[f"artifacts/{digest}.gguf"] = data
        manifest = Manifest(
            version=version,
            weights_hash=TARGET.weights_hash,
            tokenizer_hash=TARGET.tokenizer_hash,
            artifact=f"sha256:{digest}",
            size=size or len(data),
            quantization="Q8_0",
        )
        self.offer = ReleaseOffer(self.offer.serial + 1, sign(manifest, SIGNER), canary, self.files.url)
        if announce:
            self.follower.notice(self.offer.serial)
        return digest

    @property
    def in_use(self) -> str:
        return self.trials.in_use

    @property
    def pool(self) -> DraftPool:
        assert self.drafts.pool is not None
        return self.drafts.pool

    async def takes(self, version: int, *, canary: bool = False, prove: bool = True) -> str:
        digest = self.publish(version, canary=canary)
        await until(lambda: self.in_use == digest)
        if prove:
            for _ in range(WINDOW):
                self.pool.health.count(True)
            await until(lambda: self.folder.state.trial is None)
        return digest


@pytest.fixture
async def device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Device]:
    monkeypatch.setattr(trials, "RETRY_FIRST_S", 0.1)
    monkeypatch.setattr(trials, "LOOK_S", 0.01)
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
        await asyncio.sleep(0.01)


async def test_a_draft_that_fails_is_left_although_the_next_one_is_still_coming(device: Device) -> None:
    await device.takes(1, prove=False)
    device.files.behaviour = Behaviour(stall_after=10)
    device.publish(2)
    await until(lambda: len(device.files.asked) == 2)
    device.pool.health.failed("llama_decode returned -3")
    await until(lambda: device.in_use == NGRAM)
    assert dict(device.refusals.by_kind) == {"failed": 1}


async def test_a_release_that_is_withdrawn_while_it_comes_is_not_waited_for(device: Device) -> None:
    device.files.behaviour = Behaviour(stall_after=10)
    bad = device.publish(1, canary=True)
    await until(lambda: device.files.asked)
    device.files.behaviour = Behaviour()
    good = device.publish(2)
    await until(lambda: device.in_use == good)
    assert device.folder.state.last_good is None and bad != good


async def test_what_is_not_offered_any_more_when_its_file_is_here_is_not_used(device: Device) -> None:
    device.files.behaviour = Behaviour(drip_s=0.00001)
    bad = device.publish(1, canary=True)
    await until(lambda: device.files.asked)
    good = device.publish(2, announce=False)  # the device has had no notice yet
    await until(lambda: device.in_use != NGRAM, within_s=30.0)
    assert device.in_use == good and device.trials.swaps == 1 and bad != good


async def test_a_canary_that_is_rolled_back_is_left_although_what_is_offered_instead_was_refused_here(
    device: Device,
) -> None:
    await device.takes(1, prove=False)
    refused = device.offer
    device.pool.health.failed("it broke")
    await until(lambda: device.in_use == NGRAM)
    await device.takes(2, canary=True)
    device.offer = dataclasses.replace(refused, serial=device.offer.serial + 1)
    device.follower.notice(device.offer.serial)
    await until(lambda: device.in_use == NGRAM)
    assert device.refusals.by_kind["remembered"] == 1


async def test_a_serial_that_nobody_has_does_not_make_it_deaf(device: Device) -> None:
    device.follower.notice((1 << 64) - 1)
    await until(lambda: device.asked >= 3)
    new = device.publish(1)
    await until(lambda: device.in_use != NGRAM)
    assert device.in_use == new


async def test_a_serial_that_went_back_is_followed_again(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_agent.releases.follower._LOWER_SERIAL_S", 0.1)
    device.offer = ReleaseOffer(100)
    device.follower.notice(100)
    await until(lambda: device.follower._settled == 100)
    device.offer = ReleaseOffer(2)
    new = device.publish(1)
    assert device.offer.serial == 3
    await until(lambda: device.in_use == new)


async def test_a_full_disk_does_not_keep_a_draft_that_fails_in_use(
    device: Device, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await device.takes(1, prove=False)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(atomic_files, "write", full)
        device.pool.health.failed("it broke")
        await until(lambda: device.in_use == NGRAM)
        assert "changes are lost" in caplog.text and "Traceback" not in caplog.text
        device.publish(2)
        await until(lambda: device.refusals.by_kind["no room"])
        assert device.in_use == NGRAM
    device.follower.notice(99)
    await until(lambda: device.in_use != NGRAM)
    assert device.folder.state.refused[0].kind == "failed"


async def test_a_file_that_is_altered_each_time_is_left_until_there_is_news(device: Device) -> None:
    device.files.behaviour = Behaviour(flip=5)
    device.publish(1)
    await until(lambda: device.follower._settled == device.offer.serial)
    assert len(device.files.asked) == 2
    device.files.behaviour = Behaviour()
    new = device.publish(2)
    await until(lambda: device.in_use == new)


async def test_a_trial_that_no_text_decides_ends_by_the_clock(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    await device.takes(1, prove=False)
    assert device.folder.state.trial is not None and device.folder.state.floor == 0
    now = time.time() + trials.TRIAL_S
    monkeypatch.setattr(time, "time", lambda: now)
    await until(lambda: device.folder.state.trial is None)
    assert device.folder.state.floor == 1


async def test_a_release_whose_publisher_is_not_trusted_any_more_is_not_loaded(device: Device, caplog: object) -> None:
    await device.takes(1)
    revoked = ReleaseLoader(device.folder, device._load, device.refusals, ())
    assert await revoked.load_first() is None
    assert device.folder.state.current is None and device.folder.state.last_good is None


async def test_a_good_draft_that_was_being_loaded_at_a_crash_is_given_up_the_second_time_only(
    device: Device, tmp_path: Path
) -> None:
    good = await device.takes(1)
    loader = ReleaseLoader(device.folder, device._load, device.refusals, (SIGNER.key_id,))
    device.folder.write(device.folder.state.loading())
    pool = await loader.load_first()
    assert pool is not None and pool.release == good and device.folder.state.strikes == 0
    for strikes in (1, 0):
        device.folder.write(device.folder.state.loading())
        await loader.recover()
        assert device.folder.state.strikes == strikes
    assert device.folder.state.current is None and device.refusals.by_kind["crashed"] == 1


async def test_a_client_beside_another_one_goes_on_with_updates_when_that_ends(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_agent.releases.updater._TAKE_OVER_S", 0.05)
    second = ReleaseUpdater(device.follower._options, device._ask)
    pool = await second.begin(TARGET, device._load)
    assert pool is None  # nothing was found good yet
    drafts = DraftManager(Pool(NGRAM))
    second.run(drafts, lambda: Pool(NGRAM))
    good = await device.takes(1)
    assert drafts.pool is not None and drafts.pool.release == NGRAM
    device.folder.close()
    await until(lambda: drafts.pool is not None and drafts.pool.release == good)
    new = device.publish(2, announce=False)
    second.notice(device.offer.serial)
    await until(lambda: drafts.pool is not None and drafts.pool.release == new)
    await second.close()
    await drafts.close()


async def test_a_model_that_is_loaded_when_nobody_waits_for_it_any_more_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, closed = threading.Event(), threading.Event()

    class Model:
        def close(self) -> None:
            closed.set()

    def load(*_: object) -> LoadedModel:
        begun.set()
        time.sleep(0.1)
        return LoadedModel("x", Model(), 0, "")  # type: ignore[arg-type]

    monkeypatch.setattr("edge_agent.drafting.pool._load", load)
    loading = asyncio.create_task(DraftPool.load(Path("x"), "x", [], DraftOptions()))
    await until(begun.is_set)
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert await asyncio.to_thread(closed.wait, 5.0)


async def test_a_draft_whose_loading_is_given_up_is_freed(device: Device) -> None:
    made: list[Pool] = []

    class Slow(Pool):
        async def warm_up(self) -> None:
            await asyncio.sleep(3600)

    async def load(path: Path, name: str, digest: str, health: DraftHealth) -> DraftPool:
        made.append(Slow(digest, health))
        return made[-1]

    await device.takes(1)
    loading = asyncio.create_task(ReleaseLoader(device.folder, load, device.refusals, (SIGNER.key_id,)).load_current())
    await until(lambda: made)
    loading.cancel()
    await asyncio.wait({loading})
    assert made[0].closed


def test_a_release_with_lower_acceptance_gets_another_try_after_a_day_and_one_that_crashed_does_not() -> None:
    from test_release_state import installed, on_trial

    for kind, left in (("worse", 0), ("crashed", 1)):
        state = on_trial(ReleaseState(), installed(1)).gave_up(kind, "it was", 1000.0)
        assert len(state.at(2000.0).refused) == 1 and len(state.at(90_000.0).refused) == left
    assert ReleaseState().take(installed(1), FirstAcceptance(), 5.0).trial is not None
