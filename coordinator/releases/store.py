"""Keep releases and samples of their trials in Redis, and a copy of the releases' states in the state directory.

A track is read, decided upon elsewhere, and swapped in whole. Redis may keep nothing, or come back with old data. Then
a bad draft that was rolled back must not go on trial again, nor a good one prove itself twice: of two copies of a
target's track the one with the greater revision counts. Samples alone are lost with Redis.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from coordinator.releases.evidence import Arm, Arms
from coordinator.releases.records import (
    CanaryEvidence,
    CanaryTrial,
    LifecycleState,
    Release,
    ReleaseTrack,
)
from coordinator.store import keys
from coordinator.store.redis_store import SESSIONS_AT_ONCE, RedisStore
from outrider.artifacts import atomic_files
from outrider.core.errors import Unavailable
from outrider.core.telemetry import SessionTelemetry

log = logging.getLogger(__name__)

BACKUP_FILE = "releases.json"
MIN_POSITIONS = 32
"""Positions of a sample at least: fewer say little."""
MAX_POSITIONS = 8_192
"""Positions of a sample that is believed: a report comes each second, and no session is so quick."""
NEW_POSITIONS = 256
"""Positions that a session may have when it is first seen and still be taken for a new one."""
IN_STEP = 4
"""Samples of one side that are taken at most for each of the other: a canary's share of a quarter leaves three."""
TENANTS = 64
"""Tenants in a trial."""
KEEP_SAMPLES_MS = 7 * 86_400_000
KEEP_SPAN_MS = 600_000
ATTEMPTS = 16
"""Attempts at a swap: each fails only because another one went through."""
_TRACKS = [keys.RELEASES, keys.RELEASE_SERIAL]


@dataclass(frozen=True)
class StoredTrack:
    """A track, as it was read from the store."""

    track: ReleaseTrack
    text: str
    """The stored text; empty if there was none."""
    readable: bool = True
    """False if another version wrote the text in another form: the track is empty then, and the text stays."""


class ReleaseStore:
    """The releases in the coordinator's store, whose connections it shares. Methods raise Unavailable without Redis."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    async def serial(self) -> int:
        """Return a number that grows whenever a release changes its state; 0 if there are none."""
        [serial] = await self._store.call("release_serial", [("GET", keys.RELEASE_SERIAL)])
        return int(serial or 0)

    async def tracks(self, weights: str = "") -> tuple[int, list[StoredTrack]]:
        """Return the serial, and the track of one target, or all ("") in the order of their hashes.

        A change meanwhile makes the serial too old, so that the track is read again.
        """
        which = ("HGET", keys.RELEASES, weights) if weights else ("HGETALL", keys.RELEASES)
        serial, found = await self._store.call("release_tracks", [("GET", keys.RELEASE_SERIAL), which])
        pairs = sorted(found.items()) if not weights else [(weights, found)] if found else []
        return int(serial or 0), [parsed(name, text) for name, text in pairs]

    async def change(self, weights: str, decide: Callable[[ReleaseTrack], ReleaseTrack]) -> ReleaseTrack:
        """Replace a target's track by what `decide`, which may be called again, makes of it; return that."""
        for _ in range(ATTEMPTS):
            _, stored = await self.tracks(weights)
            before = stored[0] if stored else StoredTrack(ReleaseTrack(weights), "")
            if not before.readable:
                raise Unavailable(
                    f"the releases of {weights!r} were written by another version; ask a coordinator of it"
                )
            after = decide(before.track)
            if after == before.track:
                return after
            after = replace(after, revision=before.track.revision + 1)
            if await self.swap(before, after):
                return after
        raise Unavailable(f"the releases of {weights!r} change all the time; ask again", retry_after_s=1.0)

    async def swap(self, before: StoredTrack, after: ReleaseTrack) -> bool:
        """Put a track in the place of another. Returns False if something else is there by now."""
        moved = before.track.states != after.states
        arguments = [after.weights, before.text, text_of(after), int(moved)]
        return bool(await self._store.run("release_swap", _TRACKS, arguments))

    async def sample(
        self,
        weights: str,
        trial: CanaryTrial,
        sessions: Sequence[SessionTelemetry],
        devices: Mapping[str, str],
    ) -> int:
        """Take samples of a trial from sessions' cumulative counts. Safe to repeat. Returns the number of samples.

        devices: `device_id` of PlacementRequest by session id; other sessions give none, since a session's arm is what
        was offered to its device. Nor do those with a lossy acceptance rule: what they accept says little of the draft.
        """
        compared = []
        for session in sessions:
            device = devices.get(session.session_id)
            if device is not None and not session.lossy and (arm := trial.arm(session.draft_release, device)):
                compared.append((session, arm))
        taken = 0
        for start in range(0, len(compared), SESSIONS_AT_ONCE):
            touched = [keys.samples(weights, trial.version)]
            arguments: list[Any] = [f"{trial.version}:{trial.name}", MIN_POSITIONS, MAX_POSITIONS, NEW_POSITIONS]
            arguments += [IN_STEP, TENANTS, KEEP_SAMPLES_MS, KEEP_SPAN_MS]
            for s, arm in compared[start : start + SESSIONS_AT_ONCE]:
                touched.append(keys.span(s.session_id))
                arguments += [arm, s.draft_release, f"{s.epoch:020d}", s.tenant, s.positions, s.first_accepted]
            taken += int(await self._store.run("release_sample", touched, arguments))
        return taken

    async def samples(self, weights: str, version: int) -> dict[str, Arms]:
        """Return the samples of a trial, by tenant."""
        [found] = await self._store.call("release_samples", [("HGETALL", keys.samples(weights, version))])
        tenants = {name.partition(":")[2] for name in found}
        return {name: Arms(_arm(found.get(f"c:{name}")), _arm(found.get(f"s:{name}"))) for name in tenants}


class ReleaseBackup:
    """Keeps a coordinator's copy. Of several over one Redis, the first that finds something lost puts it back."""

    def __init__(self, state_dir: Path, store: ReleaseStore) -> None:
        self._path = state_dir.expanduser() / BACKUP_FILE
        self._store = store
        self._kept = {kept.track.weights: kept for kept in _load(self._path)}

    async def restore(self, stored: Sequence[StoredTrack], now: float) -> bool:
        """Put back tracks that the store has lost or has in an older revision; return whether there were any."""
        by_target = {one.track.weights: one for one in stored}
        restored = False
        for weights, kept in self._kept.items():
            before = by_target.get(weights, StoredTrack(ReleaseTrack(weights), ""))
            if before.readable and before.track.revision < kept.track.revision:
                restored |= await self._store.swap(before, _restarted(kept.track, before.track, now))
        if restored:
            log.warning("the store had lost decisions on draft releases; put back what %s knows of them", self._path)
        return restored

    async def keep(self, stored: Sequence[StoredTrack]) -> None:
        """Copy the tracks that are not older than the copy, which also keeps lost ones. A full disk is only logged."""
        newer = {one.track.weights: one for one in stored if one.readable and not self._older(one)}
        kept = {**self._kept, **newer}
        if kept == self._kept:
            return
        texts = {weights: one.text for weights, one in kept.items()}
        try:
            await asyncio.to_thread(atomic_files.write, self._path, json.dumps(texts).encode(), mode=0o600)
        except OSError as error:
            log.warning("%s cannot be written (%s): draft releases are in Redis alone", self._path, error.strerror)
        self._kept = kept

    def _older(self, one: StoredTrack) -> bool:
        kept = self._kept.get(one.track.weights)
        return kept is not None and one.track.revision < kept.track.revision


def text_of(track: ReleaseTrack) -> str:
    """Return a track as it is stored, in JSON."""
    record = asdict(track)
    for release in record["releases"]:
        release["manifest"] = base64.b64encode(release["manifest"]).decode()
    return json.dumps(record)


def parsed(weights: str, text: str) -> StoredTrack:
    """Return the track of a stored text, without fields that only a later version knows."""
    try:
        record = json.loads(text)
        releases = tuple(_release_of(part) for part in record["releases"])
        return StoredTrack(ReleaseTrack(weights, int(record["newest"]), releases, int(record.get("revision", 0))), text)
    except (AttributeError, KeyError, TypeError, ValueError):
        return StoredTrack(ReleaseTrack(weights), text, readable=False)


def _release_of(record: dict[str, Any]) -> Release:
    evidence = CanaryEvidence(**_known_fields(CanaryEvidence, record["evidence"])) if record["evidence"] else None
    manifest = base64.b64decode(record["manifest"])
    changed = {"manifest": manifest, "state": LifecycleState(record["state"]), "evidence": evidence}
    return Release(**_known_fields(Release, {**record, **changed}))


def _known_fields(cls: type[CanaryEvidence | Release], record: dict[str, Any]) -> dict[str, Any]:
    return {field.name: record[field.name] for field in fields(cls) if field.name in record}


def _arm(text: str | None) -> Arm:
    count, total, squares = (text or "0 0 0").split(" ")
    return Arm(int(count), float(total), float(squares))


def _restarted(kept: ReleaseTrack, lost: ReleaseTrack, now: float) -> ReleaseTrack:
    """Return the kept track with its trial's window begun anew, since samples are lost. No version is taken twice."""
    releases = tuple(replace(r, since_unix=now) if r.state is LifecycleState.CANARY else r for r in kept.releases)
    newest = max(kept.newest, lost.newest)
    return replace(kept, newest=newest, releases=releases, revision=kept.revision + 1)


def _load(path: Path) -> list[StoredTrack]:
    """Return the tracks of the copy that this version can read."""
    try:
        targets = json.loads(path.read_text())
        tracks = [parsed(str(weights), str(text)) for weights, text in targets.items()]
        return [one for one in tracks if one.readable]
    except FileNotFoundError:
        return []
    except (OSError, ValueError, AttributeError) as error:
        log.warning("%s cannot be read and is left out: %s", path, error)
        return []
