"""Remember a target's draft releases on this device: the state, and the folder that holds it beside the files.

`current` is in use; `last_good` is the stable release to come back to. None stands for no release: n-grams alone.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, Field, ValidationError

from outrider.artifacts import atomic_files
from outrider.artifacts.store import ArtifactStore
from outrider.wire.ticket import MAX_KEY_ID

log = logging.getLogger(__name__)

FOLDER = "releases"
"""Name of the folder of all targets in a client's cache directory."""
_STATE = "state.json"

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


class ReleaseState(BaseModel, frozen=True, extra="forbid", strict=True):
    """The releases of one target. Every method returns another state."""

    format: Literal[2] = 2
    device_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")] = Field(default_factory=lambda: secrets.token_hex(16))
    """Random. It decides whether this device is among a canary's, and identifies nothing else."""
    floor: _Version = 0
    """Version of the newest stable release that was loaded; no older one is taken."""
    current: InstalledRelease | None = None
    last_good: InstalledRelease | None = None

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

    def dropped(self) -> ReleaseState:
        """Go back to the last good release."""
        return self._with(current=self.last_good, last_good=None)

    def _with(self, **changes: object) -> ReleaseState:
        return ReleaseState.model_validate(dict(self) | changes)


class ReleaseFolder:
    """The folder of one target's drafts: `state.json`, the releases' files, unfinished downloads.

    Processes may share it: each begins with the state that the last one left, and what one downloads serves all. A
    crash leaves the state before a write or the one after. root: of all targets. Raises OSError, also for a state that
    cannot be read: what was too old would be taken again.
    """

    def __init__(self, root: Path, weights_hash: str) -> None:
        self.path = root / hashlib.sha256(weights_hash.encode()).hexdigest()[:16]
        self.path.mkdir(parents=True, exist_ok=True)
        self.files = ArtifactStore(self.path, ".gguf")
        self.state = ReleaseState()
        """The state that holds for this process; `read` and `change` replace it."""
        self._is_behind = False
        """Whether the state on disk is an older one, since the last one could not be written."""
        self.read()

    def read(self) -> None:
        """Take the state on disk, if there is one, and all changes of this process are in it. Raises OSError."""
        if self._is_behind:
            return
        file = self.path / _STATE
        try:
            self.state = ReleaseState.model_validate_json(file.read_bytes())
        except FileNotFoundError:
            pass
        except ValidationError as error:
            raise OSError(
                f"{file} is damaged ({error.errors()[0]['msg']}), and with it which versions are too old to be taken;"
                " restore it, or remove it to take any version that is signed"
            ) from error

    def change(self, state: ReleaseState) -> None:
        """Change the state of this process, and on disk too where there is room."""
        self.state, self._is_behind = state, False
        try:
            atomic_files.write(self.path / _STATE, state.model_dump_json(indent=1).encode())
        except OSError as error:
            self._is_behind = True
            log.warning("%s cannot be written, so the change is lost with this process: %s", self.path, error)

    def tidy(self, wanted: str = "") -> None:
        """Remove the files of releases that the state does not name.

        wanted: digest of one that stays, since its download may go on or it is about to be taken.
        """
        named = (release.digest for release in (self.state.current, self.state.last_good) if release)
        self.files.tidy({wanted, *named})
