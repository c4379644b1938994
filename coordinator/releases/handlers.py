"""Decide about draft releases: which one a device uses, what is published, and how trials end.

The releases of a target with their states (a track) are one message in Redis, with a copy in the state directory. Redis
may keep nothing, or come back with old data. Then a bad draft that was rolled back must not go on trial again, nor a
good one prove itself twice: of two copies of a track the one with the greater revision counts. The samples of trials
alone are lost with Redis.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path

from google.protobuf import json_format
from google.protobuf.message import DecodeError

from coordinator.config import CoordinatorConfig
from coordinator.releases import evidence, lifecycle
from coordinator.releases.evidence import Arm, Arms
from coordinator.releases.lifecycle import CANARY, STABLE
from coordinator.store import keys
from coordinator.store.redis_codec import written
from coordinator.store.redis_store import Command, RedisStore, milliseconds
from coordinator.store.verifiers import VerifierStore
from outrider.artifacts import atomic_files
from outrider.artifacts.store import ArtifactStore, known_file_digest
from outrider.core.errors import BadRequest, OutriderError
from outrider.wire import manifest as manifests
from outrider.wire.manifest import name_of, trusted_keys
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry

log = logging.getLogger(__name__)

BACKUP_FILE = "releases.json"
SERIAL_S = 0.25
"""Seconds for which a serial that was read serves: every session that is opened or resumed is told it."""
MIN_POSITIONS, MAX_POSITIONS = 32, 2_048
"""Positions of a sample: fewer say little, and a session with more is older than its trial."""
IN_STEP = 4
"""Samples of one side that are taken at most for each of the other: a canary's share of a quarter leaves three. So both
are of the same time: traffic changes while a trial runs."""
TENANTS = 64
"""Tenants in a trial."""
KEEP_SAMPLES_MS = 7 * 86_400_000
KEEP_SAMPLED_MS = 600_000
"""Longer than a session goes on until it has MAX_POSITIONS, or takes to resume on another verifier."""


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
        self._store, self._verifiers = store, VerifierStore(store)
        self._config = config
        self._anonymous = anonymous
        self._publishers = trusted_keys(config.release_keys)
        self._artifacts = artifacts
        self._serial, self._tracks = 0, dict[str, pb.ReleaseTrack]()
        """What was read last: the serial, and the tracks by their targets' weights."""
        self._serial_at = -math.inf
        self._path = config.state_dir.expanduser() / BACKUP_FILE
        self._kept = _load(self._path)
        """The copy, by weights."""
        self._keeping = asyncio.Lock()
        self._told: dict[tuple[str, int], str] = {}  # trial -> what its operator was told to decide

    async def offer(self, weights: str, device_id: str) -> tuple[int, pb.Release | None]:
        """Return the serial and a device's release; None where it is to use none. Raises Unavailable."""
        serial = await self._read_if_changed()
        track = self._tracks.get(weights, pb.ReleaseTrack())
        canary = lifecycle.in_state(track, CANARY)
        drawn = canary is not None and lifecycle.in_canary(device_id, canary.name, canary.share)
        return serial, canary if drawn else lifecycle.in_state(track, STABLE)

    async def publish(self, raw: bytes) -> pb.Release:
        """Take a signed manifest. Raises BadRequest, ModelRefused for an unknown publisher, or Unavailable."""
        manifest = manifests.verify(raw, self._publishers) if self._publishers else manifests.read_unverified(raw)
        await self._restore()
        if not any(lifecycle.signed_as(track, raw) for track in self._tracks.values()):
            _check_target(manifest, await self._verifiers.find())
            if self._artifacts is not None:
                await asyncio.to_thread(check_served, self._artifacts, manifest)
        new = pb.Release(
            manifest=raw,
            version=manifest.version,
            name=name_of(manifest),
            state=lifecycle.CANDIDATE,
            since_unix=time.time(),
            reason="published",
            share=self._config.canary.share,
        )
        track = await self._change(manifest.weights_hash, lambda track: lifecycle.publish(track, new, time.time()))
        published = lifecycle.signed_as(track, raw) or new
        log.info("release %s, version %d: %s", published.name, published.version, lifecycle.words(published))
        return published

    async def releases(self, beginning: str = "") -> tuple[int, list[pb.Release]]:
        """Return the serial and all releases, or those of the file whose hash begins so, each with its evidence.

        The newest release of each target comes first. Raises NotFound, BadRequest or Unavailable.
        """
        await self._read()
        tracks, name = list(self._tracks.values()), ""
        if beginning:
            track, chosen = lifecycle.find(tracks, beginning)
            tracks, name = [track], chosen.name
        found = []
        for track in tracks:
            for release in track.releases:
                if name in ("", release.name):
                    found.append(shown := pb.Release())
                    shown.CopyFrom(release)
                    if release.state == CANARY:
                        shown.evidence.CopyFrom(await self._weighed(track, release))
        return self._serial, found

    async def apply(self, beginning: str, action: pb.ReleaseAction) -> pb.Release:
        """Carry out an operator's action on a release. Raises NotFound, BadRequest or Unavailable."""
        await self._read()
        track, chosen = lifecycle.find(self._tracks.values(), beginning)

        def applied(track: pb.ReleaseTrack) -> None:
            if (release := lifecycle.signed_as(track, chosen.manifest)) is not None:
                lifecycle.apply(track, release, action, time.time())

        after = await self._change(track.weights, applied)
        release = lifecycle.signed_as(after, chosen.manifest) or chosen
        what = pb.ReleaseAction.Name(action).removeprefix("RELEASE_ACTION_").replace("_", "").lower()
        log.info("%s of release %s by an operator: %s", what, release.name, lifecycle.words(release))
        return release

    async def serial(self) -> int:
        """Return the store's serial of releases as it was at most SERIAL_S ago; 0 if it is not known."""
        if time.monotonic() - self._serial_at > SERIAL_S:
            try:
                await self._read_if_changed()
            except OutriderError:
                return 0
        return self._serial

    async def tend(self) -> None:
        """Put back what the store has lost, copy what it has, and decide trials. Raises Unavailable."""
        await self._restore()
        await self._keep(self._tracks.values())
        for track in list(self._tracks.values()):
            try:
                await self._decide(track)
            except OutriderError:
                raise
            except Exception:  # one target's failure is no reason to leave the others undecided
                log.exception("no decision is made on the releases of %s", track.weights)

    async def _decide(self, track: pb.ReleaseTrack) -> None:
        """End the target's trial if it is due; else tell once what its operator has to decide."""
        canary, window_s = lifecycle.in_state(track, CANARY), self._config.canary.window_s
        if canary is None:
            return
        weighed = await self._weighed(track, canary)
        if lifecycle.judge(track, weighed, window_s, time.time()) is None:
            awaited, trial = lifecycle.awaited(weighed), (track.weights, canary.version)
            if awaited and not canary.pinned and self._told.get(trial) != awaited:
                log.warning("release %s, version %d: %s", canary.name, canary.version, awaited)
                self._told[trial] = awaited
            return

        def settled(track: pb.ReleaseTrack) -> None:
            # It may have been pinned or replaced meanwhile.
            now, decision = time.time(), lifecycle.judge(track, weighed, window_s, time.time())
            running = lifecycle.in_state(track, CANARY)
            if decision is not None and running is not None and running.manifest == canary.manifest:
                running.evidence.CopyFrom(weighed)
                lifecycle.settle(track, running, *decision, now)

        decided = lifecycle.signed_as(await self._change(track.weights, settled), canary.manifest) or canary
        if decided.state != CANARY:
            state = lifecycle.words(decided)
            log.warning("release %s, version %d: %s, %s", decided.name, decided.version, state, decided.reason)

    # --- samples of a trial

    async def sample(self, weights: str, sessions: Sequence[SessionTelemetry], devices: Mapping[str, str]) -> int:
        """Take a trial's samples from a report, which never fails for it; return the serial, 0 if it is not known.

        weights: hash of the verifier's target. devices: `device_id` of OpenSessionRequest by session id, of the
        sessions that were placed here. Others do not count.
        """
        try:
            serial = await self._read_if_changed()
            await self._sample(self._tracks.get(weights, pb.ReleaseTrack()), sessions, devices)
        except OutriderError as error:
            log.warning("no samples are taken from a report: %s", error)
            return 0
        except Exception:
            log.exception("no samples are taken from a report")
            return 0
        return serial

    async def _sample(
        self, track: pb.ReleaseTrack, sessions: Sequence[SessionTelemetry], devices: Mapping[str, str]
    ) -> None:
        """Take one sample from each session and arm, by the cumulative counts with one draft on one verifier.

        A session's arm is what was offered to its device. Those with a lossy acceptance rule give none: what they
        accept says little of the draft.
        """
        if (canary := lifecycle.in_state(track, CANARY)) is None:
            return
        compared = [
            (s, arm, keys.sampled(s.session_id, canary.version, arm))
            for s in sessions
            if not s.lossy and s.session_id in devices and MIN_POSITIONS <= s.positions <= MAX_POSITIONS
            if (arm := lifecycle.arm(track, s.draft_release, devices[s.session_id]))
        ]
        if not compared:
            return
        known = await self._samples(track, canary)
        taken = await self._store.call("release_sample", [("EXISTS", key) for *_, key in compared])
        counts = Counter({(t, a): arm.samples for t, arms in known.items() for a, arm in zip("cs", arms, strict=True)})
        tenants, chosen = {*known}, []
        for (s, arm, key), done in zip(compared, taken, strict=True):
            beside = counts[s.tenant, "s" if arm == "c" else "c"]
            full = counts[s.tenant, arm] >= IN_STEP * (beside + 1) or len({*tenants, s.tenant}) > TENANTS
            if not done and not full:
                counts[s.tenant, arm] += 1
                tenants.add(s.tenant)
                chosen.append((s, arm, ("SET", key, 1, "NX", "PX", KEEP_SAMPLED_MS)))
        fresh = await self._store.call("release_sample", [command for *_, command in chosen])
        sums = defaultdict[str, float](float)
        for (s, arm, _), new in zip(chosen, fresh, strict=True):
            if new:
                acceptance = s.first_accepted / s.positions
                for power, what in enumerate(("samples", "total", "squares")):
                    sums[f"{arm}:{s.tenant}:{what}"] += acceptance**power
        key = keys.samples(track.weights, canary.version)
        commands: list[Command] = [("HINCRBYFLOAT", key, name, value) for name, value in sums.items()]
        await self._store.call("release_sample", [*commands, ("PEXPIRE", key, KEEP_SAMPLES_MS)] if commands else [])

    async def _samples(self, track: pb.ReleaseTrack, canary: pb.Release) -> dict[str, Arms]:
        """Return the samples of a trial, by tenant."""
        command = ("HGETALL", keys.samples(track.weights, canary.version))
        [found] = await self._store.call("release_samples", [command])

        def arm(letter: str, tenant: str) -> Arm:
            samples, total, squares = (
                float(found.get(f"{letter}:{tenant}:{what}", 0)) for what in ("samples", "total", "squares")
            )
            return Arm(int(samples), total, squares)

        return {tenant: Arms(arm("c", tenant), arm("s", tenant)) for tenant in {name.split(":")[1] for name in found}}

    async def _weighed(self, track: pb.ReleaseTrack, canary: pb.Release) -> pb.ReleaseEvidence:
        """Return the evidence of a trial."""
        needed = 1 if await self._anonymous() else self._config.canary.tenants
        return evidence.weigh(await self._samples(track, canary), needed)

    # --- tracks in the store, and their copy

    async def _read(self) -> None:
        """Read all tracks. A change meanwhile makes the serial too old, so that they are read again."""
        commands = [("GET", keys.RELEASE_SERIAL), ("HGETALL", keys.RELEASES)]
        begun = time.monotonic()
        serial, found = await self._store.call("release_tracks", commands)
        self._tracks = {weights: _track(weights, found[weights]) for weights in sorted(found)}
        self._serial, self._serial_at = int(serial or 0), begun

    async def _read_if_changed(self) -> int:
        """Read all tracks if the serial, which grows with every change, is another than it was. Return it."""
        begun = time.monotonic()
        [serial] = await self._store.call("release_serial", [("GET", keys.RELEASE_SERIAL)])
        if int(serial or 0) != self._serial:
            await self._read()
        self._serial_at = begun
        return self._serial

    async def _change(self, weights: str, decide: Callable[[pb.ReleaseTrack], None]) -> pb.ReleaseTrack:
        """Change a target's track by `decide`, which may be called again; return it. It is copied at once: a decision
        must not be lost in the second until the next look.

        Nothing is read behind the change: if that failed, an operator would take it for undone and promote twice.
        """
        wanted: pb.ReleaseTrack | None = None

        def changed(
            known: str | None, serial: str | None, time: Sequence[str]
        ) -> tuple[pb.ReleaseTrack, list[Command]]:
            nonlocal wanted
            before, after = _track(weights, known), pb.ReleaseTrack()
            if before == wanted:
                return before, []  # the reply to the attempt before was lost
            after.CopyFrom(before)
            decide(after)
            if after == before:
                return after, []
            after.revision += 1
            wanted = after
            grown = max(1000 * milliseconds(time), int(serial or 0) + 1)
            return after, [
                ("HSET", keys.RELEASES, weights, after.SerializeToString()),
                ("SET", keys.RELEASE_SERIAL, grown),
            ]

        reads = [("HGET", keys.RELEASES, weights), ("GET", keys.RELEASE_SERIAL), ("TIME",)]
        watched = [keys.RELEASES, keys.RELEASE_SERIAL]
        track: pb.ReleaseTrack = await self._store.change("release_swap", watched, reads, changed)
        self._serial_at = -math.inf
        await self._keep([track])
        return track

    async def _restore(self) -> None:
        """Read all tracks, after those were put back that the store has lost or has in an older revision.

        A trial's window begins anew, since its samples are lost. No version is taken twice.
        """
        await self._read()
        none = pb.ReleaseTrack()
        lost = [kept for kept in self._kept.values() if self._tracks.get(kept.weights, none).revision < kept.revision]
        for kept in lost:

            def restored(track: pb.ReleaseTrack, kept: pb.ReleaseTrack = kept) -> None:
                if track.revision < kept.revision:
                    newest = max(track.newest, kept.newest)
                    track.CopyFrom(kept)
                    track.newest = newest
                    if (canary := lifecycle.in_state(track, CANARY)) is not None:
                        canary.since_unix = time.time()

            await self._change(kept.weights, restored)
        if lost:
            log.warning("the store had lost decisions on draft releases; put back what %s knows of them", self._path)
            await self._read()

    async def _keep(self, tracks: Iterable[pb.ReleaseTrack]) -> None:
        """Copy the tracks that are not older than the copy, which also keeps lost ones. A full disk is only logged."""
        async with self._keeping:  # a copy that was begun earlier must not end in the place of a later one
            kept = dict(self._kept)
            for track in tracks:
                if track.weights not in kept or track.revision >= kept[track.weights].revision:
                    kept[track.weights] = track
            if kept == self._kept:
                return
            try:
                text = json_format.MessageToJson(pb.ReleaseTracks(tracks=kept.values()))
                await asyncio.to_thread(atomic_files.write, self._path, text.encode(), mode=0o600)
            except OSError as error:
                log.warning("%s cannot be written (%s): draft releases are in Redis alone", self._path, error.strerror)
            self._kept = kept


def _track(weights: str, record: str | None) -> pb.ReleaseTrack:
    """Return a target's track as Redis keeps it; one that cannot be read is taken for lost, so that it stops nobody."""
    track = pb.ReleaseTrack()
    try:
        track.ParseFromString(written(record))
    except DecodeError:
        log.warning("what the store has of the releases of %s cannot be read; it counts as lost", weights)
        track.Clear()
    track.weights = weights
    return track


def _load(path: Path) -> dict[str, pb.ReleaseTrack]:
    """Return the copy by weights; an empty one if there is none, or none that can be read."""
    try:
        return {one.weights: one for one in json_format.Parse(path.read_bytes(), pb.ReleaseTracks()).tracks}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, json_format.ParseError) as error:
        log.warning("%s cannot be read and is left out: %s", path, error)
        return {}


def _check_target(manifest: pb.Manifest, verifiers: Sequence[pb.VerifierStatus]) -> None:
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


def check_served(artifacts: ArtifactStore, manifest: pb.Manifest) -> None:
    """Raise BadRequest if this coordinator's folder has not the manifest's file, unless absolute URLs alone name it."""
    path = artifacts.find(name_of(manifest))
    if path is None:
        if manifest.urls and all("://" in url for url in manifest.urls):
            return
        raise BadRequest(
            f"{artifacts.path(name_of(manifest)).name} is not in {artifacts.folder}, from where devices would fetch it;"
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
    if found != name_of(manifest):
        raise BadRequest(
            f"{path} is damaged or another file: its SHA-256 is {found}; put the right one there",
            field="manifest.artifact",
        )
