"""Decide about draft releases: which one a device uses, what is published, and how trials end."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

from coordinator.config import CoordinatorConfig
from coordinator.releases import evidence, lifecycle
from coordinator.releases.records import (
    CanaryEvidence,
    LifecycleState,
    Release,
    ReleaseAction,
    ReleaseTrack,
    in_canary,
)
from coordinator.releases.store import ReleaseBackup, ReleaseStore
from coordinator.store.redis_store import RedisStore
from coordinator.store.verifiers import VerifierStore
from outrider.artifacts.store import ArtifactStore, known_file_digest
from outrider.core.errors import BadRequest, OutriderError
from outrider.wire import manifest as manifests
from outrider.wire.manifest import Manifest, trusted_keys
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry

log = logging.getLogger(__name__)

SERIAL_S = 0.25
"""Seconds for which a serial that was read serves: every session that is opened or resumed is told it."""
CANARY_BOUND = 0.05
"""A canary whose acceptance is worse by this much, from 0 to 1, is rolled back; one that is as good as the release
beside it becomes stable; one between may do either."""
MAX_TARGETS = 4_096
"""Targets whose trials are remembered here."""


class ReleaseHandlers:
    """Makes one process's decisions. What it remembers is read again when the store has changed.

    anonymous: tells whether callers need no key, so that all of them are one tenant. artifacts: the draft files that
    this coordinator serves at `base_url`, if it serves any.
    """

    def __init__(
        self,
        store: RedisStore,
        config: CoordinatorConfig,
        anonymous: Callable[[], Awaitable[bool]],
        artifacts: ArtifactStore | None = None,
        base_url: str = "",
    ) -> None:
        """Trust `release_keys`, or every publisher that Admin admits if there are none. Raises BadRequest."""
        self.base_url = base_url
        self._releases, self._verifiers = ReleaseStore(store), VerifierStore(store)
        self._backup = ReleaseBackup(config.state_dir, self._releases)
        self._config = config
        self._anonymous = anonymous
        self._publishers = trusted_keys(config.release_keys)
        self._artifacts = artifacts
        self._serial_read, self._serial_read_at = 0, -math.inf
        self._tracks: dict[str, tuple[int, ReleaseTrack]] = {}
        """Weights hash of a target -> serial, its track as it was then."""
        self._told: dict[tuple[str, int], str] = {}  # trial -> what its operator was told to decide

    async def offer(self, weights: str, device_id: str) -> tuple[int, Release | None]:
        """Return the serial and a device's release; None where it is to use none. Raises Unavailable."""
        serial, stored = await self._releases.tracks(weights)
        track = stored[0] if stored else ReleaseTrack(weights)
        canary = track.canary
        drawn = canary is not None and in_canary(device_id, canary.name, canary.share)
        return serial, canary if drawn else track.stable

    async def publish(self, raw: bytes) -> LifecycleState:
        """Take a signed manifest. Raises BadRequest, ModelRefused for an unknown publisher, or Unavailable."""
        manifest = manifests.verify(raw, self._publishers) if self._publishers else manifests.read_unverified(raw)
        if not any(one.find(raw) for one in await self._restored()):
            _check_target(manifest, await self._verifiers.find())
            if self._artifacts is not None:
                await asyncio.to_thread(check_served, self._artifacts, manifest)
        now, share = time.time(), self._config.canary_share
        new = Release(raw, manifest.version, manifest.digest, LifecycleState.CANDIDATE, now, "published", share)
        track = await self._change(manifest.weights_hash, lambda track: lifecycle.publish(track, new, time.time()))
        published = track.find(raw) or new
        log.info("release %s, version %d: %s", published.name, published.version, published.state.value)
        return published.state

    async def releases(self, beginning: str = "") -> tuple[int, list[Release]]:
        """Return the serial and all releases, or those of the file whose hash begins so, each with its evidence.

        The newest release of each target comes first. Raises NotFound, BadRequest or Unavailable.
        """
        serial, stored = await self._releases.tracks()
        found = [(one, release) for one in stored for release in one.releases]
        if beginning:
            track, chosen = lifecycle.find(stored, beginning)
            found = [(track, release) for release in track.releases if release.name == chosen.name]
        return serial, [
            replace(release, evidence=await self._weighed(track, release)) if release is track.canary else release
            for track, release in found
        ]

    async def apply(self, beginning: str, action: ReleaseAction) -> Release:
        """Carry out an operator's action on a release. Raises NotFound, BadRequest or Unavailable."""
        _, stored = await self._releases.tracks()
        track, chosen = lifecycle.find(stored, beginning)

        def applied(track: ReleaseTrack) -> ReleaseTrack:
            release = track.find(chosen.manifest)
            return lifecycle.apply(track, release, action, time.time()) if release else track

        after = await self._change(track.weights, applied)
        release = after.find(chosen.manifest) or chosen
        log.info("%s of release %s by an operator: %s", action.value, release.name, release.state.value)
        return release

    async def sample(self, weights: str, sessions: Sequence[SessionTelemetry], devices: Mapping[str, str]) -> int:
        """Take a trial's samples from a report, which never fails for it; return the serial, 0 if it is not known.

        weights: hash of the verifier's target; "" for a verifier that is not known. devices: `device_id` of
        PlacementRequest by session id, of the sessions that were placed here. Others do not count.
        """
        try:
            serial, track = await self._running(weights)
            await self._releases.sample(track, sessions, devices)
        except OutriderError as error:
            log.warning("no samples are taken from a report: %s", error)
            return 0
        except Exception:
            log.exception("no samples are taken from a report")
            return 0
        return serial

    async def serial(self) -> int:
        """Return the store's serial of releases as it was at most SERIAL_S ago; 0 if it is not known."""
        if time.monotonic() - self._serial_read_at > SERIAL_S:
            begun = time.monotonic()
            try:
                self._serial_read = await self._releases.serial()
            except OutriderError:
                return 0
            self._serial_read_at = begun
        return self._serial_read

    async def tend(self) -> None:
        """Put back what the store has lost, copy what it has, and decide trials. Raises Unavailable."""
        stored = await self._restored()
        await self._backup.keep(stored)
        running = {(one.weights, c.version) for one in stored if (c := one.canary) is not None}
        self._told = {trial: told for trial, told in self._told.items() if trial in running}
        for one in stored:
            try:
                await self._decide(one)
            except OutriderError:
                raise
            except Exception:  # one target's failure is no reason to leave the others undecided
                log.exception("no decision is made on the releases of %s", one.weights)

    async def _decide(self, track: ReleaseTrack) -> None:
        canary, bound, window_s = track.canary, CANARY_BOUND, self._config.canary_window_s
        if canary is None:
            return
        weighed = await self._weighed(track, canary)
        if lifecycle.judge(track, weighed, bound, window_s, time.time()) is None:
            self._tell(track, canary, lifecycle.awaited(weighed, bound))
            return

        def settled(track: ReleaseTrack) -> ReleaseTrack:
            # It may have been pinned meanwhile.
            decision = lifecycle.judge(track, weighed, bound, window_s, time.time())
            if decision is None:
                return track
            return lifecycle.settle(track, canary, *decision, weighed, time.time())

        after = await self._change(track.weights, settled)
        decided = after.find(canary.manifest) or canary
        if decided.state is not LifecycleState.CANARY:
            log.warning(
                "release %s, version %d: %s, %s", decided.name, decided.version, decided.state.value, decided.reason
            )

    def _tell(self, track: ReleaseTrack, canary: Release, awaited: str) -> None:
        """Log once what the operator has to decide."""
        trial = (track.weights, canary.version)
        if awaited and not canary.pinned and self._told.get(trial) != awaited:
            log.warning("release %s, version %d: %s", canary.name, canary.version, awaited)
            self._told[trial] = awaited

    async def _restored(self) -> list[ReleaseTrack]:
        """Return all tracks, after what the store has lost was put back."""
        _, stored = await self._releases.tracks()
        if await self._backup.restore(stored, time.time()):
            _, stored = await self._releases.tracks()
        return stored

    async def _change(self, weights: str, decide: Callable[[ReleaseTrack], ReleaseTrack]) -> ReleaseTrack:
        """Change a track and copy it at once: a decision must not be lost in the second until the next look.

        Nothing is read behind the change: if that failed, an operator would take it for undone and promote twice.
        """
        track = await self._releases.change(weights, decide)
        self._serial_read_at = -math.inf
        await self._backup.keep([track])
        return track

    async def _weighed(self, track: ReleaseTrack, canary: Release) -> CanaryEvidence:
        """Return the evidence of a trial."""
        needed = 1 if await self._anonymous() else self._config.canary_tenants
        samples = await self._releases.samples(track.weights, canary.version)
        return evidence.weigh(samples, CANARY_BOUND, needed)

    async def _running(self, weights: str) -> tuple[int, ReleaseTrack]:
        """Return the serial and a target's track, which is read again only if the serial has changed."""
        serial = await self._releases.serial()
        read_at, track = self._tracks.get(weights, (0, ReleaseTrack(weights)))
        if weights and serial != read_at:
            _, stored = await self._releases.tracks(weights)
            if len(self._tracks) >= MAX_TARGETS:
                self._tracks.clear()
            track = stored[0] if stored else ReleaseTrack(weights)
            self._tracks[weights] = serial, track
        return serial, track


def _check_target(manifest: Manifest, verifiers: Sequence[pb.VerifierStatus]) -> None:
    """Raise BadRequest for a draft of another vocabulary than its target's. Its target may be down for now."""
    targets = [v.target for v in verifiers if v.target.weights_hash == manifest.weights_hash]
    if not targets:
        log.warning("no verifier serves %s, for which version %d is", manifest.weights_hash, manifest.version)
    known = sorted({target.tokenizer_hash for target in targets})
    if known and manifest.tokenizer_hash not in known:
        raise BadRequest(
            f"manifest.tokenizer_hash is {manifest.tokenizer_hash!r}, and target {targets[0].name!r} has {known[0]!r}:"
            " the draft would mean other text by the same ids; build it with the target's own tokenizer",
            field="manifest.tokenizer_hash",
        )


def check_served(artifacts: ArtifactStore, manifest: Manifest) -> None:
    """Raise BadRequest if this coordinator's folder has not the manifest's file, unless absolute URLs alone name it."""
    path = artifacts.find(manifest.digest)
    if path is None:
        if manifest.urls and all("://" in url for url in manifest.urls):
            return
        raise BadRequest(
            f"{artifacts.path(manifest.digest).name} is not in {artifacts.folder}, from where devices would fetch it;"
            " put it there first, or name in the manifest where it is",
            field="manifest.artifact",
        )
    try:
        size = path.stat().st_size
        if size != manifest.size:
            raise BadRequest.bound("manifest.size", manifest.size, f"{size} bytes, as {path.name} has")
        found = known_file_digest(path)
    except OSError as error:
        raise BadRequest(f"{path} cannot be read: {error.strerror}", field="manifest.artifact") from error
    if found != manifest.digest:
        raise BadRequest(
            f"{path} is damaged or another file: its SHA-256 is {found}; put the right one there",
            field="manifest.artifact",
        )
