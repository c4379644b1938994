"""Keep releases and samples of their trials in Redis, and a copy of the releases' states in the state directory.

A track is read, decided upon elsewhere, and swapped in whole. Redis may keep nothing, or come back with old data. Then
a bad draft that was rolled back must not go on trial again, nor a good one prove itself twice: of two copies of a
target's track the one with the greater revision counts. Samples alone are lost with Redis.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from coordinator.releases.evidence import Arm, Arms
from coordinator.releases.records import LifecycleState, ReleaseTrack
from coordinator.store import keys
from coordinator.store.redis_store import SESSIONS_AT_ONCE, Command, RedisStore, milliseconds
from outrider.artifacts import atomic_files
from outrider.core.errors import Unavailable
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry

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
_TRACK, _TRACKS_COPY = TypeAdapter(ReleaseTrack), TypeAdapter(list[ReleaseTrack])


class ReleaseStore:
    """The releases in the coordinator's store, whose connections it shares. Methods raise Unavailable without Redis."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    async def serial(self) -> int:
        """Return a number that grows whenever a release changes its state; 0 if there are none."""
        [serial] = await self._store.call("release_serial", [("GET", keys.RELEASE_SERIAL)])
        return int(serial or 0)

    async def tracks(self, weights: str = "") -> tuple[int, list[ReleaseTrack]]:
        """Return the serial, and the track of one target, or all ("") in the order of their hashes.

        A change meanwhile makes the serial too old, so that the track is read again.
        """
        which = ("HGET", keys.RELEASES, weights) if weights else ("HGETALL", keys.RELEASES)
        serial, found = await self._store.call("release_tracks", [("GET", keys.RELEASE_SERIAL), which])
        texts = [found[name] for name in sorted(found)] if not weights else [found] if found else []
        return int(serial or 0), [_TRACK.validate_json(text) for text in texts]

    async def change(self, weights: str, decide: Callable[[ReleaseTrack], ReleaseTrack]) -> ReleaseTrack:
        """Replace a target's track by what `decide`, which may be called again, makes of it; return that."""
        for _ in range(ATTEMPTS):
            _, stored = await self.tracks(weights)
            before = stored[0] if stored else ReleaseTrack(weights)
            after = decide(before)
            if after == before:
                return after
            after = replace(after, revision=before.revision + 1)
            if await self.swap(before, after):
                return after
        raise Unavailable(f"the releases of {weights!r} change all the time; ask again", retry_after_s=1.0)

    async def swap(self, before: ReleaseTrack, after: ReleaseTrack) -> bool:
        """Put a track in the place of another, which has the revision 0 if there is none. Returns False if something
        else is there by now."""
        read = _TRACK.dump_json(before).decode() if before.revision else ""
        wanted, grows = _TRACK.dump_json(after).decode(), before.states != after.states

        def decide(known: str | None, serial: str | None, time: Sequence[str]) -> tuple[bool, list[Command]]:
            if (known or "") != read:
                return known == wanted, []  # a caller whose reply was lost asks again
            commands: list[Command] = [("HSET", keys.RELEASES, after.weights, wanted)]
            if grows or not serial:
                commands += [("SET", keys.RELEASE_SERIAL, max(1000 * milliseconds(time), int(serial or 0) + 1))]
            return True, commands

        reads = [("HGET", keys.RELEASES, after.weights), ("GET", keys.RELEASE_SERIAL), ("TIME",)]
        return await self._store.change("release_swap", [keys.RELEASES, keys.RELEASE_SERIAL], reads, decide)

    async def sample(
        self,
        track: ReleaseTrack,
        sessions: Sequence[SessionTelemetry],
        devices: Mapping[str, str],
    ) -> int:
        """Take samples of the track's trial from sessions' cumulative counts. Safe to repeat. Returns how many.

        devices: `device_id` of PlacementRequest by session id; other sessions give none, since a session's arm is what
        was offered to its device. Nor do those with a lossy acceptance rule: what they accept says little of the draft.
        """
        if (canary := track.canary) is None:
            return 0
        compared = []
        for session in sessions:
            device = devices.get(session.session_id)
            if device is not None and not session.lossy and (arm := track.arm(session.draft_release, device)):
                compared.append((session, arm))
        taken = 0
        for start in range(0, len(compared), SESSIONS_AT_ONCE):
            touched = [keys.samples(track.weights, canary.version)]
            arguments: list[Any] = [f"{canary.version}:{canary.name}", MIN_POSITIONS, MAX_POSITIONS, NEW_POSITIONS]
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
        self._kept = {kept.weights: kept for kept in _load(self._path)}
        self._keeping = asyncio.Lock()

    async def restore(self, stored: Sequence[ReleaseTrack], now: float) -> bool:
        """Put back tracks that the store has lost or has in an older revision; return whether there were any."""
        by_target = {track.weights: track for track in stored}
        restored = False
        for weights, kept in self._kept.items():
            before = by_target.get(weights, ReleaseTrack(weights))
            if before.revision < kept.revision:
                restored |= await self._store.swap(before, _restarted(kept, before, now))
        if restored:
            log.warning("the store had lost decisions on draft releases; put back what %s knows of them", self._path)
        return restored

    async def keep(self, stored: Sequence[ReleaseTrack]) -> None:
        """Copy the tracks that are not older than the copy, which also keeps lost ones. A full disk is only logged."""
        async with self._keeping:  # a copy that was begun earlier must not end in the place of a later one
            newer = {one.weights: one for one in stored if one.revision >= self._revision(one.weights)}
            kept = {**self._kept, **newer}
            if kept == self._kept:
                return
            try:
                written = _TRACKS_COPY.dump_json([*kept.values()])
                await asyncio.to_thread(atomic_files.write, self._path, written, mode=0o600)
            except OSError as error:
                log.warning("%s cannot be written (%s): draft releases are in Redis alone", self._path, error.strerror)
            self._kept = kept

    def _revision(self, weights: str) -> int:
        return self._kept[weights].revision if weights in self._kept else 0


def _arm(text: str | None) -> Arm:
    count, total, squares = (text or "0 0 0").split(" ")
    return Arm(int(count), float(total), float(squares))


def _restarted(kept: ReleaseTrack, lost: ReleaseTrack, now: float) -> ReleaseTrack:
    """Return the kept track with its trial's window begun anew, since samples are lost. No version is taken twice."""
    releases = tuple(replace(r, since_unix=now) if r.state is LifecycleState.CANARY else r for r in kept.releases)
    newest = max(kept.newest, lost.newest)
    return replace(kept, newest=newest, releases=releases, revision=kept.revision + 1)


def _load(path: Path) -> list[ReleaseTrack]:
    try:
        return _TRACKS_COPY.validate_json(path.read_bytes())
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        log.warning("%s cannot be read and is left out: %s", path, error)
        return []
