"""Compute and read the SHA-256 that names an artifact: 64 hex digits on disk, "sha256:<hex>" in messages."""

from __future__ import annotations

import functools
import hashlib
import re
import threading
from pathlib import Path

from outrider.core.errors import BadRequest

PREFIX = "sha256:"
_CONTENT_HASH = re.compile(PREFIX + r"([0-9a-f]{64})")


_READING = threading.Lock()


def file_digest(path: Path) -> str:
    """Return the hex digits of a file's hash. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def known_file_digest(path: Path) -> str:
    """Return what `file_digest` does, read from disk again only if the file's size or time of change is another.

    Callers in several threads wait for one another, so that one of them reads a file for all.
    """
    stat = path.stat()
    with _READING:
        return _known(path, stat.st_size, stat.st_mtime_ns)


@functools.lru_cache(maxsize=1024)
def _known(path: Path, size: int, mtime_ns: int) -> str:
    return file_digest(path)


def content_hash(content: Path | bytes) -> str:
    """Return "sha256:<hex>" of a file or of bytes. Raises OSError."""
    return PREFIX + (file_digest(content) if isinstance(content, Path) else hashlib.sha256(content).hexdigest())


def digest_of(content_hash: str, field: str) -> str:
    """Return the hex digits in "sha256:<hex>", safe as a file's name. Raises BadRequest for any other form."""
    match = _CONTENT_HASH.fullmatch(content_hash)
    if match is None:
        raise BadRequest.bound(field, repr(content_hash)[:100], '"sha256:" and 64 hex digits')
    return match[1]
