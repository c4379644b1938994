"""Publishing: a file in the artifact store, a manifest signed for it, and the coordinator told, so that a kill anywhere
harms nothing.

The order is what makes it so. The file lies whole under its own hash before anything names it; the signed manifest lies
in the ledger before the coordinator hears of it, and is what it hears again after a kill. Only a version that somebody
else has taken meanwhile is signed anew.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cloud_verifier.distill.publishing.ledger import Entry, Ledger
from cloud_verifier.distill.publishing.release_client import (
    CANARY,
    CANDIDATE,
    ROLLED_BACK,
    STABLE,
    SUPERSEDED,
    Known,
    Releases,
)
from outrider.artifacts.store import ArtifactStore
from outrider.core.errors import BadRequest, ModelRefused, PermissionDenied
from outrider.wire.manifest import Manifest, sign
from outrider.wire.ticket import Signer

log = logging.getLogger(__name__)

MAX_PROMOTIONS = 2
"""From candidate over canary to stable."""


@dataclass(frozen=True)
class TargetHashes:
    """The target that drafts are for."""

    weights_hash: str
    tokenizer_hash: str


@dataclass(frozen=True)
class Draft:
    """A file that passed the gate."""

    file: Path
    quantization: str
    parent: str = ""
    """Hex digest of the draft that it was trained from; empty for a first one."""
    metrics: Mapping[str, float] = field(default_factory=dict)


class Publisher:
    """Signs and publishes drafts for one target, and publishes again what the coordinator has forgotten."""

    def __init__(
        self,
        releases: Releases,
        ledger: Ledger,
        artifacts: ArtifactStore,
        signer: Signer,
        target: TargetHashes,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._releases = releases
        self._ledger = ledger
        self._artifacts = artifacts
        self._signer = signer
        self._target = target
        self._clock = clock
        self._refused: set[str] = set()
        """Digests that the coordinator did not take again."""

    @property
    def target(self) -> TargetHashes:
        """That drafts are signed for."""
        return self._target

    async def publish(self, draft: Draft) -> Known:
        """Publish a draft; the same one again publishes nothing new. Raises core errors."""
        digest = self._artifacts.put(draft.file)
        known = await self.known()
        if digest in known:
            return known[digest]
        entry = self._ledger.get(digest)
        if entry is None or entry.manifest.version <= _newest(known):
            version = 1 + max(_newest(known), *(one.manifest.version for one in self._own()), 0)
            entry = Entry(sign(self._manifest(draft, digest, version), self._signer))
            self._ledger.put(entry)
        return await self._tell(entry)

    async def known(self) -> dict[str, Known]:
        """This target's releases by digest, as the coordinator has them now; the ledger notes what it says."""
        found: dict[str, Known] = {}
        for known in await self._releases.list():  # of a file that was released twice, the newer release comes first
            if known.manifest.weights_hash == self._target.weights_hash:
                found.setdefault(known.digest, known)
        for known in found.values():
            self._ledger.note(known.digest, known.state, known.reason)
        return found

    async def restore(self, known: Mapping[str, Known]) -> Sequence[str]:
        """Publish again what the coordinator should know of and does not, as when its store has lost its data.

        That is the newest of ours that was stable, which need not prove itself again, and what is newer and was not
        rolled back. Returns the digests of those that were taken. Raises Unavailable.
        """
        own = [entry for entry in self._own() if entry.state]
        stable = max((entry.manifest.version for entry in own if entry.state in (STABLE, SUPERSEDED)), default=0)
        restored = []
        for entry in own:
            manifest = entry.manifest
            lost = manifest.digest not in known and manifest.version > _newest(known)
            if not lost or manifest.version < stable or entry.state == ROLLED_BACK:
                continue
            was = entry.state
            if manifest.digest not in self._refused:
                log.warning("the coordinator has forgotten release %d, which was %s", manifest.version, was)
            try:
                now = await self._tell(entry)
                if was in (STABLE, SUPERSEDED):
                    await self._promote(now)
            except (BadRequest, ModelRefused, PermissionDenied) as error:  # of a key that is trusted no more, too
                if manifest.digest not in self._refused:
                    log.error("release %d is not taken again: %s", manifest.version, error)
                self._refused.add(manifest.digest)
            else:
                self._refused.discard(manifest.digest)
                restored.append(manifest.digest)
        return restored

    async def _tell(self, entry: Entry) -> Known:
        state = await self._releases.publish(entry.raw)
        manifest = entry.manifest
        self._ledger.note(manifest.digest, state)
        log.info(
            "published release %d, %s.. (%d bytes): %s", manifest.version, manifest.digest[:12], manifest.size, state
        )
        return Known(manifest, entry.raw, state)

    async def _promote(self, known: Known) -> None:
        state = known.state
        for _ in range(MAX_PROMOTIONS):
            if state in (CANDIDATE, CANARY):
                state = await self._releases.promote(known.digest)
        self._ledger.note(known.digest, state)

    def _own(self) -> list[Entry]:
        """The oldest first."""
        return [e for e in self._ledger.all() if e.manifest.weights_hash == self._target.weights_hash]

    def _manifest(self, draft: Draft, digest: str, version: int) -> Manifest:
        file = self._artifacts.path(digest)
        return Manifest(
            version=version,
            weights_hash=self._target.weights_hash,
            tokenizer_hash=self._target.tokenizer_hash,
            artifact=f"sha256:{digest}",
            size=file.stat().st_size,
            quantization=draft.quantization,
            parent=f"sha256:{draft.parent}" if draft.parent else "",
            urls=(f"artifacts/{file.name}",),
            metrics=dict(draft.metrics),
            created_unix=self._clock(),
        )


def _newest(known: Mapping[str, Known]) -> int:
    """Version; 0 where there is none."""
    return max((one.manifest.version for one in known.values()), default=0)
