"""Remember a target's draft releases on this device: the state, and the folder that holds it beside the files.

`current` is in use; `last_good` is the stable release to come back to. None stands for no release: n-grams alone.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections.abc import Collection, Iterator
from io import BufferedRandom
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from outrider.artifacts import atomic_files
from outrider.artifacts.store import ArtifactStore
from outrider.wire.ticket import MAX_KEY_ID

log = logging.getLogger(__name__)

FOLDER = "releases"
"""Name of the folder of all targets in a client's cache directory."""
MAX_REFUSED = 32
"""Refusals that are remembered, the latest."""
MAX_REASON = 400
_STATE, _BAD, _LOCK, _TARGET = "state.json", "state.json.bad", "lock", "target"
_MAX_STATE = 1 << 18
"""Bytes: 32 refusals are below it, whatever their reasons are made of."""

_Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_Version = Annotated[int, Field(ge=0, lt=1 << 64)]


class InstalledRelease(BaseModel, frozen=True, extra="forbid", strict=True):
    """A release whose file is on this device."""

    digest: _Hex
    """SHA-256 of the file, by which the release is named."""
    version: _Version
    canary: bool
    """Whether only some devices were offered it, when it was last offered."""
    manifest: _Hex
    """SHA-256 of the signed part of its manifest."""
    key_id: Annotated[str, Field(max_length=MAX_KEY_ID)] = ""
    """Id of the publisher's key."""

    def __str__(self) -> str:
        return f"release {self.digest[:12]} (version {self.version})"


class Refusal(BaseModel, frozen=True, extra="forbid", strict=True):
    """A release that could not be loaded, and why."""

    release: InstalledRelease
    kind: Annotated[str, Field(max_length=32)]
    reason: Annotated[str, Field(max_length=MAX_REASON)]
    at_unix: float
    """Time in seconds."""


class ReleaseState(BaseModel, frozen=True, extra="forbid", strict=True):
    """The releases of one target. Every method returns another state."""

    format: Literal[1] = 1
    device_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] = Field(default_factory=lambda: secrets.token_hex(16))
    """Random. It decides whether this device is among a canary's, and identifies nothing else."""
    floor: _Version = 0
    """Version of the newest stable release that was loaded; no older one is taken."""
    current: InstalledRelease | None = None
    last_good: InstalledRelease | None = None
    refused: Annotated[tuple[Refusal, ...], Field(max_length=MAX_REFUSED)] = ()

    def refusal(self, manifest: str) -> Refusal | None:
        """Return why the release with this manifest was refused; None if it was not."""
        return next((refusal for refusal in self.refused if refusal.release.manifest == manifest), None)

    def trusting(self, keys: Collection[str]) -> ReleaseState:
        """Drop the releases of publishers that are no longer trusted. keys: ids of the trusted ones."""
        state = self
        if state.last_good is not None and state.last_good.key_id not in keys:
            state = state._with(last_good=None)
        if state.current is not None and state.current.key_id not in keys:
            state = state.dropped()
        return state

    def take(self, release: InstalledRelease) -> ReleaseState:
        """Make a release that was loaded the current one; a stable one that was current is the last good one."""
        before, good = self.current, self.last_good
        if before is not None and before.digest != release.digest and not before.canary:
            good = before
        if good is not None and good.digest == release.digest:
            good = None
        floor = self.floor if release.canary else max(self.floor, release.version)
        return self._with(current=release, last_good=good, floor=floor)

    def refuse(self, release: InstalledRelease, kind: str, reason: str, now_unix: float) -> ReleaseState:
        """Remember that a release could not be loaded; if it is the current one, go back to the last good one."""
        refusal = Refusal(release=release, kind=kind, reason=reason[:MAX_REASON], at_unix=now_unix)
        kept = tuple(one for one in self.refused if one.release.manifest != release.manifest)
        state = self.dropped() if self.current == release else self
        return state._with(refused=(*kept, refusal)[-MAX_REFUSED:])

    def dropped(self) -> ReleaseState:
        """Go back to the last good release, without blame for the current one."""
        return self._with(current=self.last_good, last_good=None)

    def left(self) -> ReleaseState:
        """Use no release."""
        return self._with(current=None, last_good=None)

    def forgotten(self) -> ReleaseState:
        """Allow another try to the releases that were refused."""
        return self._with(refused=())

    def _with(self, **changes: object) -> ReleaseState:
        return ReleaseState.model_validate(dict(self) | changes)


class ReleaseFolder:
    """The folder of one target's drafts: `state.json`, the releases' files, unfinished downloads, a lock.

    One process at a time changes it; others may read it. A crash leaves the state before a write or the one after.
    """

    def __init__(self, path: Path, lock: BufferedRandom | None, state: ReleaseState) -> None:
        self.path = path
        self.files = ArtifactStore(path, ".gguf")
        self._lock = lock
        self.state = state
        """The state that holds for this process; `write` and `change` replace it."""

    @classmethod
    def open(cls, root: Path, weights_hash: str) -> ReleaseFolder:
        """Open the folder of a target's drafts, and lock it unless another process has. Raises OSError.

        root: of all targets.
        """
        path = root / hashlib.sha256(weights_hash.encode()).hexdigest()[:16]
        path.mkdir(parents=True, exist_ok=True)
        lock = atomic_files.lock(path / _LOCK)
        if lock is not None:
            atomic_files.write(path / _TARGET, weights_hash.encode())
        return cls(path, lock, read(path, keep=lock is not None))

    @property
    def writable(self) -> bool:
        """Return whether this process has the lock."""
        return self._lock is not None

    def write(self, state: ReleaseState) -> None:
        """Change the state, once it is on disk. Raises OSError, and then the old one holds."""
        if not self.writable:
            raise PermissionError("another process is using this folder")
        atomic_files.write(self.path / _STATE, state.model_dump_json(indent=1).encode())
        self.state = state

    def change(self, state: ReleaseState) -> None:
        """Change the state of this process, on disk too where it has the lock and there is room."""
        try:
            self.write(state)
        except OSError as error:
            if self.writable:
                log.warning("%s cannot be written, so the change is lost with this process: %s", self.path, error)
            self.state = state

    def tidy(self, wanted: str = "") -> None:
        """Remove the files of releases that the state does not name.

        wanted: digest of one that stays, since its download may go on or it is about to be taken.
        """
        named = (release.digest for release in (self.state.current, self.state.last_good) if release)
        self.files.tidy({wanted, *named})

    def close(self) -> None:
        """Release the lock, so that another process may keep the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def read(path: Path, *, keep: bool) -> ReleaseState:
    """Return the state on disk, or a new one where it cannot be used. keep: put such a file aside first."""
    file = path / _STATE
    try:
        with file.open("rb") as stream:
            data = stream.read(_MAX_STATE + 1)
        if len(data) > _MAX_STATE:
            raise ValueError(f"it has more than {_MAX_STATE} bytes")
        return ReleaseState.model_validate_json(data)
    except FileNotFoundError:
        return ReleaseState()
    except (OSError, ValueError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        log.warning(
            "%s cannot be used (%s): this device begins without a release, and has forgotten which "
            "versions and which refused releases it must not take; the file is kept as %s",
            file,
            reason,
            _BAD,
        )
        if keep:
            os.replace(file, path / _BAD)
        return ReleaseState()


def folders(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield (weights hash, folder) of every target that has one."""
    for path in sorted(root.glob(f"*/{_TARGET}")):
        yield path.read_text(errors="replace")[:200], path.parent
