"""Keep a target's draft releases on disk: `state.json`, the slots' files, unfinished downloads, a lock.

One process at a time changes the folder; others may read it.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Iterator
from io import BufferedRandom
from pathlib import Path

from pydantic import ValidationError

from edge_agent.releases.state import ReleaseState
from outrider.artifacts import atomic_files
from outrider.artifacts.store import ArtifactStore

log = logging.getLogger(__name__)

FOLDER = "releases"
"""Below a client's cache directory."""
_STATE, _BAD, _LOCK, _TARGET = "state.json", "state.json.bad", "lock", "target"
_MAX_STATE = 65_536
"""Bytes: 32 refusals with their reasons are far below it."""


class SlotStore:
    """The folder of one target. `change` writes before it returns; a crash leaves the state before or the one after."""

    def __init__(self, folder: Path, lock: BufferedRandom | None, state: ReleaseState) -> None:
        self.folder = folder
        self.files = ArtifactStore(folder, ".gguf")
        self._lock = lock
        self._state = state
        self._written = True

    @classmethod
    def open(cls, root: Path, target: str) -> SlotStore:
        """root: of all targets. target: its weights hash. Raises OSError for a folder that cannot be written to."""
        folder = root / hashlib.sha256(target.encode()).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        lock = atomic_files.lock(folder / _LOCK)
        if lock is not None:
            atomic_files.write(folder / _TARGET, target.encode())
        return cls(folder, lock, read(folder, keep=lock is not None))

    @property
    def ours(self) -> bool:
        """Whether this process may change it; another one does otherwise."""
        return self._lock is not None

    @property
    def state(self) -> ReleaseState:
        return self._state

    def change(self, state: ReleaseState) -> None:
        """Raises OSError, and then the old state holds."""
        if not self.ours:
            raise PermissionError("another process keeps this folder")
        if state != self._state or not self._written or not (self.folder / _STATE).exists():
            atomic_files.write(self.folder / _STATE, state.model_dump_json(indent=1).encode())
        self._state, self._written = state, True

    def hold(self, state: ReleaseState) -> None:
        """As `change`; what the disk has no room for holds all the same, and is written with what comes next."""
        try:
            self.change(state)
        except OSError as error:
            if not self.ours:
                raise
            log.warning("%s cannot be written, so that a crash forgets: %s", self.folder / _STATE, error)
            self._state, self._written = state, False

    def tidy(self, wanted: str = "") -> None:
        """Remove what no slot holds. wanted: a release whose download may go on, or that is taken soon."""
        self.files.tidy({wanted, *(slot.digest for slot in (self._state.current, self._state.last_good) if slot)})

    def close(self) -> None:
        """Another process may keep it from now on."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def read(folder: Path, *, keep: bool) -> ReleaseState:
    """What is remembered. What cannot be read is put aside (where `keep`), said, and begun anew."""
    path = folder / _STATE
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_STATE + 1)
        if len(data) > _MAX_STATE:
            raise ValueError(f"it has more than {_MAX_STATE} bytes")
        return ReleaseState.model_validate_json(data)
    except FileNotFoundError:
        return ReleaseState()
    except (OSError, ValueError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        log.warning(
            "%s cannot be used (%s): this device begins with the verifier's own draft, and has forgotten which "
            "versions and which refused releases it must not take; the file is kept as %s",
            path,
            reason,
            _BAD,
        )
        if keep:
            os.replace(path, folder / _BAD)
        return ReleaseState()


def folders(root: Path) -> Iterator[tuple[str, Path]]:
    """(weights hash, folder) of every target that has one."""
    for path in sorted(root.glob(f"*/{_TARGET}")):
        yield path.read_text(errors="replace")[:200], path.parent
