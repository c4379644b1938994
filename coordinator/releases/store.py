"""Releases in Redis, by way of the coordinator's store. What is read is decided upon elsewhere and swapped in whole.

Everything here can be lost: `backup` brings back what was decided, and only samples of a canary under way matter.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from coordinator.releases.records import Evidence, Release, ReleaseTrack, Sample, State, Trial
from coordinator.store import keys
from coordinator.store.redis_store import SESSIONS_AT_ONCE, RedisStore
from outrider.core.errors import Unavailable
from outrider.core.telemetry import SessionTelemetry

LEAST = 32
"""Positions of a stretch: fewer say little."""
MOST = 8_192
"""Of one that is believed: a report comes each second, and no session is so quick."""
FRESH = 256
"""Positions that a session may have when it is first seen and still be taken for a new one."""
TENANT_SAMPLES = 2_048
"""On either side, so that no tenant fills a trial; then neither of its sides gets more."""
ARM_SAMPLES = 4_096
"""On either side, of all tenants: several times what tells a draft that makes no difference from one 0.05 worse."""
KEEP_SAMPLES_MS = 7 * 86_400_000
KEEP_STRETCH_MS = 600_000
TRIES = 16
"""Of a swap: each fails only because another one went through."""


@dataclass(frozen=True)
class Read:
    """A line as it was found."""

    line: ReleaseTrack
    written: str
    """The text of it; empty where there was none."""
    readable: bool = True
    """False for the text of a version that writes otherwise: the line says nothing then, and the text stays."""


class ReleaseStore:
    """Shares the store's connections. Every method raises Unavailable while Redis is away."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store

    async def lines(self, weights: str = "") -> tuple[int, list[Read]]:
        """The serial, and the releases of one target, or of all ("") in the order of their hashes."""
        serial, *parts = await self._store.run("release_lines", _LINES, [weights])
        pairs = sorted(zip(parts[::2], parts[1::2], strict=True))
        return int(serial), [found(name, text) for name, text in pairs]

    async def serial(self) -> int:
        """Grows whenever a release changes its state; 0 where there are none."""
        return (await self.lines(_NO_TARGET))[0]

    async def change(self, weights: str, decide: Callable[[ReleaseTrack], ReleaseTrack]) -> ReleaseTrack:
        """Put what `decide` makes of a target's releases in their place, whoever else decides meanwhile.

        `decide` may be called more than once. What it raises is raised.
        """
        for _ in range(TRIES):
            _, there = await self.lines(weights)
            before = there[0] if there else Read(ReleaseTrack(weights), "")
            if not before.readable:
                raise Unavailable(f"the releases of {weights} were written by another version; ask a coordinator of it")
            after = decide(before.line)
            if after == before.line:
                return after
            after = replace(after, revision=before.line.revision + 1)
            if await self.swap(before, after):
                return after
        raise Unavailable(f"the releases of {weights} change all the time; ask again", retry_after_s=1.0)

    async def swap(self, before: Read, after: ReleaseTrack) -> bool:
        """False where something else is there by now."""
        moved = _states(before.line) != _states(after)
        arguments = [after.weights_hash, before.written, written(after), int(moved)]
        return bool(await self._store.run("release_swap", _LINES, arguments))

    async def on_target(self, verifier_id: str, serial: int, weights: str) -> tuple[int, str, ReleaseTrack | None]:
        """Serial, hash and releases of a verifier's target; None: none, or those that `weights` had at `serial`."""
        touched = [*_LINES, keys.verifier(verifier_id)]
        now, target, text = await self._store.run("release_trial", touched, [serial, weights])
        return int(now), target, found(target, text).line if text else None

    async def sample(self, weights: str, trial: Trial, sessions: Sequence[SessionTelemetry], per_session: int) -> int:
        """Take what these sessions show of a trial; returns how many samples that were. Safe to repeat."""
        compared = [session for session in sessions if trial.arm(session.draft_release)]
        lots = [compared[i : i + SESSIONS_AT_ONCE] for i in range(0, len(compared), SESSIONS_AT_ONCE)]
        return sum([await self._sample(weights, trial, lot, per_session) for lot in lots])

    async def _sample(self, weights: str, trial: Trial, lot: Sequence[SessionTelemetry], per_session: int) -> int:
        touched = [keys.samples(weights, trial.version), keys.sampled(weights, trial.version)]
        arguments: list[Any] = [f"{trial.version}:{trial.name}", LEAST, MOST, FRESH]
        arguments += [per_session, TENANT_SAMPLES, ARM_SAMPLES, KEEP_SAMPLES_MS, KEEP_STRETCH_MS]
        for s in lot:
            touched.append(keys.span(s.session_id))
            arguments += [trial.arm(s.draft_release), s.draft_release, f"{s.epoch:020d}", s.tenant, s.traffic_class]
            arguments += [s.positions, s.first_accepted]
        return int(await self._store.run("release_sample", touched, arguments))

    async def samples(self, weights: str, version: int, known: int = 0) -> list[Sample] | None:
        """Of a canary's trial, in the order in which they came; None where there are just as many as are known.

        What another version wrote, or what cannot be read for any other reason, is left out.
        """
        touched = [keys.samples(weights, version)]
        count, *texts = await self._store.run("release_samples", touched, [known])
        return None if int(count) == known else [sample for sample in map(_sample, texts) if sample is not None]


_NO_TARGET = "-"
_LINES = [keys.RELEASES, keys.RELEASE_SERIAL]


def written(line: ReleaseTrack) -> str:
    """As it is stored: JSON."""
    record = asdict(line)
    for release in record["releases"]:
        release["manifest"] = base64.b64encode(release["manifest"]).decode()
    return json.dumps(record)


def found(weights: str, text: str) -> Read:
    """The inverse. Fields that only a later version knows are left out."""
    try:
        record = json.loads(text)
        releases = tuple(_release(part) for part in record["releases"])
        return Read(ReleaseTrack(weights, int(record["newest"]), releases, int(record.get("revision", 0))), text)
    except (AttributeError, KeyError, TypeError, ValueError):
        return Read(ReleaseTrack(weights), text, readable=False)


def _release(record: dict[str, Any]) -> Release:
    evidence = Evidence(**_known(Evidence, record["evidence"])) if record["evidence"] else None
    manifest = base64.b64decode(record["manifest"])
    changed = {"manifest": manifest, "state": State(record["state"]), "evidence": evidence}
    return Release(**_known(Release, {**record, **changed}))


def _known(kind: type[Evidence | Release], record: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in record.items() if name in names}


def _states(line: ReleaseTrack) -> list[tuple[int, State]]:
    return [(release.version, release.state) for release in line.releases]


def _sample(text: str) -> Sample | None:
    try:
        arm, tenant, traffic, right, positions, ms = text.split(":")
        return Sample(arm == "c", tenant, traffic, int(right), int(positions), int(ms) / 1000.0)
    except ValueError:
        return None
