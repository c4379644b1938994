"""Keep a target's draft releases on disk: `state.json`, the releases' files, unfinished downloads, a lock.

One process at a time changes the folder; other processes may read it.
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
"""Name of the folder of all targets in a client's cache directory."""
_STATE, _BAD, _LOCK, _TARGET = "state.json", "state.json.bad", "lock", "target"
_MAX_STATE = 65_536
"""Bytes: 32 refusals with their reasons are far below it."""


class ReleaseFolder:
    """The folder of one target's drafts.

    A crash while it is written leaves the state before or the one after.
    """

    def __init__(self, path: Path, lock: BufferedRandom | None, state: ReleaseState) -> None:
        self.path = path
        self.files = ArtifactStore(path, ".gguf")
        self._lock = lock
        self.state = state
        """The state that holds for this process; `write` and `change` replace it."""
        self._written = True
        """Whether the state is on disk."""

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
        if state != self.state or not self._written or not (self.path / _STATE).exists():
            atomic_files.write(self.path / _STATE, state.model_dump_json(indent=1).encode())
        self.state, self._written = state, True

    def change(self, state: ReleaseState) -> None:
        """Change the state even if the disk has no room for it; the next change writes it then."""
        try:
            self.write(state)
        except OSError as error:
            if not self.writable:
                raise
            log.warning("%s cannot be written, so changes are lost if this process dies: %s", self.path / _STATE, error)
            self.state, self._written = state, False

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
