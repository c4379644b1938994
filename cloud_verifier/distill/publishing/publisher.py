"""Publish a draft: store its file, sign its manifest and send that to the coordinator, so that no kill does harm.

The order of the steps ensures it. The file is whole under its own hash before anything names it. The signed manifest is
in the ledger before it is sent, and the same one is sent again after a kill. A new one is signed only if another
publisher has taken its version meanwhile.
"""

from __future__ import annotations

import json
import logging
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cloud_verifier.distill.publishing.release_client import (
    CANARY,
    CANDIDATE,
    ROLLED_BACK,
    STABLE,
    SUPERSEDED,
    ReleaseClient,
    ReleaseRecord,
)
from outrider.artifacts import atomic_files
from outrider.artifacts.store import ArtifactStore
from outrider.core.errors import BadRequest, ModelRefused, PermissionDenied
from outrider.wire.manifest import Manifest, read_unverified, sign
from outrider.wire.ticket import Signer

log = logging.getLogger(__name__)

MAX_PROMOTIONS = 2
"""Promotions from candidate to canary and on to stable."""


@dataclass(frozen=True)
class TargetHashes:
    """The hashes ("sha256:<hex>") by which verifiers announce a target."""

    weights_hash: str
    tokenizer_hash: str


class ReleaseLedger:
    """Manifests that this publisher has signed, kept on its own disk since the coordinator's store may lose everything.

    Each release is in a file `FOLDER/<64 hex digits>.json`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def put(self, record: ReleaseRecord) -> None:
        """Write a release; its state is empty until the coordinator has answered. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        text = {"manifest": b64encode(record.raw).decode(), "state": record.state, "reason": record.reason}
        atomic_files.write(self._path(record.digest), json.dumps(text, indent=1).encode())

    def get(self, digest: str) -> ReleaseRecord | None:
        """Return a release, or None if it is not this publisher's. Raises BadRequest if its file is damaged."""
        path = self._path(digest)
        return _read(path) if path.is_file() else None

    def all(self) -> list[ReleaseRecord]:
        """Return all releases by version, the oldest first. Raises BadRequest for a damaged file."""
        return sorted(map(_read, self._folder.glob("*.json")), key=lambda record: record.manifest.version)

    def note(self, digest: str, state: str, reason: str = "") -> None:
        """Record the coordinator's state of a release; of another publisher's releases nothing is recorded."""
        record = self.get(digest)
        if record is not None and (record.state, record.reason) != (state, reason):
            self.put(replace(record, state=state, reason=reason))

    def _path(self, digest: str) -> Path:
        return self._folder / f"{digest}.json"


class Publisher:
    """Signs drafts for one target, and publishes again what the coordinator has lost."""

    def __init__(
        self,
        registry: ReleaseClient,
        ledger: ReleaseLedger,
        artifacts: ArtifactStore,
        signer: Signer,
        target: TargetHashes,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._registry = registry
        self._ledger = ledger
        self._artifacts = artifacts
        self._signer = signer
        self.target = target
        self._clock = clock
        self._refused: set[str] = set()
        """Digests that the coordinator refused to take again."""

    async def publish(
        self, file: Path, quantization: str, parent: str = "", metrics: Mapping[str, float] | None = None
    ) -> ReleaseRecord:
        """Publish a file; a file that is published already is not published again. Raises core errors.

        parent: hex digest of the draft that it was trained from, if any. metrics: for the manifest.
        """
        digest = self._artifacts.put(file)
        known = await self.known()
        if digest in known:
            return known[digest]
        record = self._ledger.get(digest)
        if record is None or record.manifest.version <= _newest(known):
            manifest = Manifest(
                version=1 + max(_newest(known), *(one.manifest.version for one in self._own()), 0),
                weights_hash=self.target.weights_hash,
                tokenizer_hash=self.target.tokenizer_hash,
                artifact=f"sha256:{digest}",
                size=self._artifacts.path(digest).stat().st_size,
                quantization=quantization,
                parent=f"sha256:{parent}" if parent else "",
                urls=(f"artifacts/{self._artifacts.path(digest).name}",),
                metrics=dict(metrics or {}),
                created_unix=self._clock(),
            )
            record = ReleaseRecord(manifest, sign(manifest, self._signer))
            self._ledger.put(record)
        return await self._send(record)

    async def known(self) -> dict[str, ReleaseRecord]:
        """Return the coordinator's releases of this target by digest, and record their states in the ledger."""
        found: dict[str, ReleaseRecord] = {}
        for known in await self._registry.list():  # newest first, and a file may be released twice
            if known.manifest.weights_hash == self.target.weights_hash:
                found.setdefault(known.digest, known)
        for known in found.values():
            self._ledger.note(known.digest, known.state, known.reason)
        return found

    async def restore(self, known: Mapping[str, ReleaseRecord]) -> Sequence[str]:
        """Publish again the releases that the coordinator should know and does not, as after its store lost its data.

        These are the publisher's newest release that was stable, which is promoted to stable without a trial, and those
        that are newer and were not rolled back. Returns the digests that the coordinator took. Raises Unavailable.
        """
        own = [record for record in self._own() if record.state]
        stable = max((record.manifest.version for record in own if record.state in (STABLE, SUPERSEDED)), default=0)
        restored = []
        for record in own:
            manifest = record.manifest
            lost = manifest.digest not in known and manifest.version > _newest(known)
            if not lost or manifest.version < stable or record.state == ROLLED_BACK:
                continue
            if manifest.digest not in self._refused:
                log.warning("the coordinator has lost release %d, which was %s", manifest.version, record.state)
            try:
                sent = await self._send(record)
                if record.state in (STABLE, SUPERSEDED):
                    await self._promote(sent)
            except (BadRequest, ModelRefused, PermissionDenied) as error:  # also for a key that is no longer trusted
                if manifest.digest not in self._refused:
                    log.error("release %d is not taken again: %s", manifest.version, error)
                self._refused.add(manifest.digest)
            else:
                self._refused.discard(manifest.digest)
                restored.append(manifest.digest)
        return restored

    async def _send(self, record: ReleaseRecord) -> ReleaseRecord:
        state = await self._registry.publish(record.raw)
        manifest = record.manifest
        self._ledger.note(manifest.digest, state)
        log.info(
            "published release %d, %s.. (%d bytes): %s", manifest.version, manifest.digest[:12], manifest.size, state
        )
        return replace(record, state=state)

    async def _promote(self, record: ReleaseRecord) -> None:
        state = record.state
        for _ in range(MAX_PROMOTIONS):
            if state in (CANDIDATE, CANARY):
                state = await self._registry.promote(record.digest)
        self._ledger.note(record.digest, state)

    def _own(self) -> list[ReleaseRecord]:
        """Return this publisher's releases for this target, the oldest first."""
        return [one for one in self._ledger.all() if one.manifest.weights_hash == self.target.weights_hash]


def create_key(path: Path) -> Signer:
    """Create a publisher's key in a file that only its owner can read. Raises BadRequest if the file exists."""
    path = path.expanduser()
    if path.exists():
        raise BadRequest(f"{path} exists; a key that devices trust is not overwritten: give another name", field="key")
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    signer = Signer.generate()
    atomic_files.write(path, signer.pem(), mode=0o600)
    return signer


def _newest(known: Mapping[str, ReleaseRecord]) -> int:
    """Return the version of the newest release, 0 if there is none."""
    return max((one.manifest.version for one in known.values()), default=0)


def _read(path: Path) -> ReleaseRecord:
    try:
        text = json.loads(path.read_bytes())
        raw = b64decode(text["manifest"], validate=True)
        return ReleaseRecord(read_unverified(raw), raw, str(text["state"]), str(text["reason"]))
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise BadRequest(f"{path} is no entry of the publisher's ledger ({error}); move it away") from error
