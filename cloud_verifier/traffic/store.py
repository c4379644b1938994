"""Store segments in a directory, or in an object store that fsspec knows. A file exists whole or not at all."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from outrider.artifacts import atomic_files

GIVEN_UP_S = 3600.0
"""A writer that has not finished a file after so long never will."""


@dataclass(frozen=True)
class StoredFile:
    """Names a file of the store, with its size."""

    path: str
    """Path below the store's root."""
    size: int
    """Size in bytes."""

    @property
    def folder(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


class SegmentStore:
    """Reads and writes whole files below one place."""

    def __init__(self, url: str) -> None:
        """Open `url`, a directory, which is created, or a URL for fsspec. Raises ImportError if fsspec lacks a package,
        OSError or ValueError if there is no such place."""
        self._fs, root = fsspec.core.url_to_fs(str(url))
        self._root = root.rstrip("/")
        self._local = isinstance(self._fs, LocalFileSystem)
        if self._local:
            os.makedirs(self._root, exist_ok=True)

    def files(self) -> list[StoredFile]:
        """Return all files that are complete, by path."""
        self._fs.invalidate_cache()
        try:
            known: dict[str, dict[str, Any]] = self._fs.find(self._root, detail=True)
        except FileNotFoundError:
            return []
        return [
            StoredFile(path[len(self._root) :].lstrip("/"), int(about.get("size") or 0))
            for path, about in sorted(known.items())
            if not path.endswith(atomic_files.PARTIAL)
        ]

    def read(self, path: str) -> bytes:
        """Return a file's bytes. Raises FileNotFoundError."""
        return bytes(self._fs.cat_file(self._absolute(path)))

    def put(self, path: str, data: bytes) -> None:
        """Write or replace a file. If the process is killed midway, nothing has changed. Raises OSError."""
        target = self._absolute(path)
        if not self._local:
            self._fs.pipe_file(target, data)  # object stores show an object when it is complete
            return
        os.makedirs(os.path.dirname(target), exist_ok=True)
        atomic_files.write(Path(target), data)

    def delete(self, path: str) -> None:
        """Delete a file, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._absolute(path))

    def sweep(self) -> None:
        """Delete incomplete files that killed writers have left."""
        if not self._local:
            return
        for left in Path(self._root).rglob(f".*{atomic_files.PARTIAL}"):
            with contextlib.suppress(OSError):
                if left.stat().st_mtime < time.time() - GIVEN_UP_S:
                    left.unlink()

    def _absolute(self, path: str) -> str:
        return f"{self._root}/{path}"
