"""Write files that are there whole or not at all, even where the machine loses power a moment later."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from io import BufferedRandom
from pathlib import Path

PARTIAL = ".partial"
"""The suffix of a file that is still being written; nothing reads it under this name."""


def write(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Replace `path` by a file of these bytes, created with these permissions (less the umask). Raises OSError."""
    with replacing(path, shared=True) as partial:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)


@contextlib.contextmanager
def replacing(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """Yield the name of a file to write in place of `path`.

    The file moves to `path` when the body ends, and is removed if the body raises. shared: whether there may be several
    writers, each with a name of its own; else one that a killed process has left under the same name is overwritten.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}{PARTIAL}" if shared else path.name + PARTIAL)
    try:
        yield partial
        replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def replace(finished: Path, path: Path) -> None:
    """Move a finished file to `path` in the same folder, both its bytes and its name on disk before this returns."""
    with finished.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(finished, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def lock(path: Path) -> BufferedRandom | None:
    """Open a file, created if need be, and lock it until it is closed or the process ends.

    Returns None if another process, or another part of this one, holds the lock. Raises OSError for a file that cannot
    be opened. The file at `path` when this returns is the one that was locked: its former holder may have moved it
    away between opening and locking.
    """
    while True:
        file = path.open("a+b")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):
                return file
        except OSError:  # a file system without locks, too
            file.close()
            return None
        file.close()


def _is_at(file: BufferedRandom, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False
