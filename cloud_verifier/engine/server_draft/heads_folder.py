"""Keep the heads of a target in a folder that the distillation loop writes and verifiers read: files, and their states.

A new file is a canary until a verifier has compared sessions with it and without it (heads_trial.py). Nothing is
signed, since heads never leave the operator's machines: who may write to the folder decides what verifiers propose, and
what they propose changes no token.
"""

from __future__ import annotations

import time
from io import BufferedRandom
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, Field, ValidationError

from cloud_verifier.engine.server_draft.head_models import HeadsFile, load_heads
from outrider.artifacts import atomic_files
from outrider.artifacts.store import ArtifactStore
from outrider.core.errors import ModelRefused

RELEASES = "heads.json"
LOCK_S = 5.0
"""Seconds to wait for another process that changes the folder."""
_MAX_BYTES = 1 << 20
_KEPT = 50
"""Decided heads that are listed, of all targets together."""

HeadsState = Literal["canary", "stable", "superseded", "rolled_back"]


class HeadsRelease(BaseModel, frozen=True):
    """Says what became of one file of heads."""

    digest: str = Field(pattern=r"^[0-9a-f]{64}$")
    target: str
    """Identity of its target, "sha256:<hex>"."""
    version: int = Field(ge=1)
    state: HeadsState
    reason: str = ""
    created_unix: float


class _Releases(BaseModel, frozen=True):
    releases: tuple[HeadsRelease, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Self:
        try:
            if path.stat().st_size > _MAX_BYTES:
                raise ModelRefused(f"{path} has more than {_MAX_BYTES} bytes: it is no list of heads")
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return cls()
        except (OSError, ValidationError) as error:
            raise ModelRefused(f"{path} cannot be read ({str(error).splitlines()[0]}); move it away") from error


class HeadsFolder:
    """Lists, adds and judges the heads of one target. Several processes may do so at once."""

    def __init__(self, folder: Path, target: str) -> None:
        """target: identity of the target, "sha256:<hex>"; heads of others are passed over."""
        self._files = ArtifactStore(folder, ".safetensors")
        self._path = self._files.folder / RELEASES
        self._target = target

    def path(self, digest: str) -> Path:
        """Return the path of a file of heads."""
        return self._files.path(digest)

    def changed(self) -> float:
        """Return the time of the last change, in seconds; 0 before any."""
        try:
            return self._path.stat().st_mtime
        except OSError:
            return 0.0

    def releases(self) -> tuple[HeadsRelease, ...]:
        """Return the target's heads, the newest first. Raises ModelRefused for a damaged list."""
        found = [one for one in _Releases.read(self._path).releases if one.target == self._target]
        return tuple(sorted(found, key=lambda one: -one.version))

    def newest(self, state: HeadsState) -> HeadsRelease | None:
        """Return the newest heads in a state, if their file is there."""
        return next((one for one in self.releases() if one.state == state and self.path(one.digest).is_file()), None)

    def add(self, file: Path) -> HeadsRelease:
        """Copy a file of heads into the folder, and make it the canary; one that is there stays as it is.

        Raises ModelRefused for heads of another target and for damaged ones, and OSError.
        """
        if (target := HeadsFile.read(file).target) != self._target:
            raise ModelRefused(f"{file} has heads of target {target}, this folder's are of {self._target}")
        load_heads(file, self._target)  # for its checks: verifiers would only roll damaged heads back
        digest = self._files.put(file)
        found = self._changed_by(digest, "canary", "")
        if found is None:
            raise RuntimeError(f"the folder of heads does not know {digest}, which was put there a moment ago")
        return found

    def decide(self, digest: str, state: Literal["stable", "rolled_back"], reason: str) -> HeadsRelease | None:
        """Decide about a canary; None if another process has done so. Raises OSError."""
        return self._changed_by(digest, state, reason)

    def _changed_by(self, digest: str, state: HeadsState, reason: str) -> HeadsRelease | None:
        """Enter a new state. Stable heads that newer ones replace are superseded; a canary is then rolled back, since
        nobody has found that it is good."""
        self._files.folder.mkdir(parents=True, exist_ok=True)
        with self._locked():
            listed = _Releases.read(self._path).releases
            known = next((one for one in listed if one.digest == digest), None)
            if state == "canary" and known is not None:
                return known
            if state != "canary" and (known is None or known.state != "canary"):
                return None
            version = 1 + max((one.version for one in listed), default=0)
            new = HeadsRelease(
                digest=digest,
                target=self._target,
                version=known.version if known else version,
                state=state,
                reason=reason,
                created_unix=known.created_unix if known else time.time(),
            )
            replaced: dict[str, str] = {}
            if state == "stable":
                replaced = {"state": "superseded"}
            elif state == "canary":
                replaced = {"state": "rolled_back", "reason": f"heads {digest[:12]} came before it was decided"}
            others = [
                one.model_copy(update=replaced) if one.state == state and one.target == self._target else one
                for one in listed
                if one.digest != digest
            ]
            listing = [*others, new]
            recent = [one.digest for one in listing if one.state not in ("canary", "stable")][-_KEPT:]
            kept = [one for one in listing if one.state in ("canary", "stable") or one.digest in recent]
            atomic_files.write(self._path, _Releases(releases=tuple(kept)).model_dump_json(indent=1).encode())
            return new

    def _locked(self) -> BufferedRandom:
        """Return the folder's lock, held until it is closed. Raises OSError if others hold it for too long."""
        until = time.monotonic() + LOCK_S
        while (lock := atomic_files.lock(self._files.folder / "lock")) is None:
            if time.monotonic() > until:
                raise OSError(f"{self._files.folder} is locked by another process")
            time.sleep(0.05)
        return lock
