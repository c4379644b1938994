"""Keep releases and samples of their trials in Redis. A track is read, decided upon elsewhere, and swapped in whole.

Everything here can be lost: `backup` brings back what was decided, and only samples of a running trial matter.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from coordinator.releases.records import (
    AcceptanceSample,
    CanaryEvidence,
    CanaryTrial,
    LifecycleState,
    Release,
    ReleaseTrack,
)
from coordinator.store import keys
from coordinator.store.redis_store import SESSIONS_AT_ONCE, RedisStore
from outrider.core.errors import Unavailable
from outrider.core.telemetry import SessionTelemetry

MIN_POSITIONS = 32
"""Positions of a sample at least: fewer say little."""
MAX_POSITIONS = 8_192
"""Positions of a sample that is believed: a report comes each second, and no session is so quick."""
NEW_POSITIONS = 256
"""Positions that a session may have when it is first seen and still be taken for a new one."""
TENANT_SAMPLES = 2_048
"""Samples of a tenant on either side, so that no tenant fills a trial. If one side is full, neither gets more."""
ARM_SAMPLES = 4_096
"""Samples of all tenants on either side: several times what distinguishes a draft that is as good from one that is 0.05
worse."""
KEEP_SAMPLES_MS = 7 * 86_400_000
KEEP_SPAN_MS = 600_000
ATTEMPTS = 16
"""Attempts at a swap: each fails only because another one went through."""
_TRACKS = [keys.RELEASES, keys.RELEASE_SERIAL]
_NO_TARGET = "-"


@dataclass(frozen=True)
class StoredTrack:
    """Hold a track as it was read from the store."""

    track: ReleaseTrack
    text: str
    """The stored text; empty if there was none."""
    readable: bool = True
    """False if another version wrote the text in another form: the track is empty then, and the text stays."""


class ReleaseStore:
    """Releases in the coordinator's store, whose connections it shares. Methods raise Unavailable without Redis."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    async def tracks(self, weights: str = "") -> tuple[int, list[StoredTrack]]:
        """Return the serial, and the tracks of one target, or of all ("") in the order of their hashes."""
        serial, *parts = await self._store.run("release_tracks", _TRACKS, [weights])
        pairs = sorted(zip(parts[::2], parts[1::2], strict=True))
        return int(serial), [parsed(name, text) for name, text in pairs]

    async def serial(self) -> int:
        """Return a number that grows whenever a release changes its state; 0 if there are none."""
        return (await self.tracks(_NO_TARGET))[0]

    async def change(self, weights: str, decide: Callable[[ReleaseTrack], ReleaseTrack]) -> ReleaseTrack:
        """Replace a target's track by what `decide` makes of it, whoever else decides meanwhile, and return that.

        `decide` may be called more than once. What it raises is raised.
        """
        for _ in range(ATTEMPTS):
            _, stored = await self.tracks(weights)
            before = stored[0] if stored else StoredTrack(ReleaseTrack(weights), "")
            if not before.readable:
                raise Unavailable(f"the releases of {weights} were written by another version; ask a coordinator of it")
            after = decide(before.track)
            if after == before.track:
                return after
            after = replace(after, revision=before.track.revision + 1)
            if await self.swap(before, after):
                return after
        raise Unavailable(f"the releases of {weights} change all the time; ask again", retry_after_s=1.0)

    async def swap(self, before: StoredTrack, after: ReleaseTrack) -> bool:
        """Put a track in the place of another. Returns False if something else is there by now."""
        moved = _states(before.track) != _states(after)
        arguments = [after.weights_hash, before.text, text_of(after), int(moved)]
        return bool(await self._store.run("release_swap", _TRACKS, arguments))

    async def of_verifier(self, verifier_id: str, serial: int, weights: str) -> tuple[int, str, ReleaseTrack | None]:
        """Return serial, weights hash and track of a verifier's target.

        The track is None if there is none, or if it is that of `weights` at `serial`, which the caller knows.
        """
        touched = [*_TRACKS, keys.verifier(verifier_id)]
        now, target, text = await self._store.run("release_trial", touched, [serial, weights])
        return int(now), target, parsed(target, text).track if text else None

    async def sample(
        self, weights: str, trial: CanaryTrial, sessions: Sequence[SessionTelemetry], session_samples: int
    ) -> int:
        """Take samples of a trial from sessions' cumulative counts. Safe to repeat. Returns the number of samples."""
        compared = [session for session in sessions if trial.arm(session.draft_release)]
        batches = [compared[i : i + SESSIONS_AT_ONCE] for i in range(0, len(compared), SESSIONS_AT_ONCE)]
        return sum([await self._sample(weights, trial, batch, session_samples) for batch in batches])

    async def _sample(
        self, weights: str, trial: CanaryTrial, sessions: Sequence[SessionTelemetry], session_samples: int
    ) -> int:
        touched = [keys.samples(weights, trial.version), keys.sampled(weights, trial.version)]
        arguments: list[Any] = [f"{trial.version}:{trial.name}", MIN_POSITIONS, MAX_POSITIONS, NEW_POSITIONS]
        arguments += [session_samples, TENANT_SAMPLES, ARM_SAMPLES, KEEP_SAMPLES_MS, KEEP_SPAN_MS]
        for s in sessions:
            touched.append(keys.span(s.session_id))
            arguments += [trial.arm(s.draft_release), s.draft_release, f"{s.epoch:020d}", s.tenant, s.traffic_class]
            arguments += [s.positions, s.first_accepted]
        return int(await self._store.run("release_sample", touched, arguments))

    async def samples(self, weights: str, version: int, known: int = 0) -> list[AcceptanceSample] | None:
        """Return the samples of a canary's trial in the order in which they came; None if there are `known` of them.

        Samples that cannot be read, as those of another version, are left out.
        """
        count, *texts = await self._store.run("release_samples", [keys.samples(weights, version)], [known])
        return None if int(count) == known else [sample for sample in map(_sample_of, texts) if sample is not None]


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


def _states(track: ReleaseTrack) -> list[tuple[int, LifecycleState]]:
    return [(release.version, release.state) for release in track.releases]


def _sample_of(text: str) -> AcceptanceSample | None:
    try:
        arm, tenant, traffic, accepted, positions, ms = text.split(":")
        return AcceptanceSample(arm == "c", tenant, traffic, int(accepted), int(positions), int(ms) / 1000.0)
    except ValueError:
        return None
