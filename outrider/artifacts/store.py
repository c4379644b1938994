"""Keep files in a folder by the hash of their content: each is there whole, or not at all, under its own digest.

The hash is SHA-256: 64 hex digits as the name of a file, "sha256:<hex>" in messages.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import re
import secrets
import shutil
import threading
from collections.abc import Collection, Iterator
from io import BufferedRandom
from pathlib import Path

from outrider.artifacts import atomic_files
from outrider.core.errors import BadRequest

PREFIX = "sha256:"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_READING = threading.Lock()


def cache_folder() -> Path:
    """Return the folder that the XDG specification gives for caches."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "outrider"


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
    digest = content_hash.removeprefix(PREFIX)
    if digest == content_hash or not _DIGEST.fullmatch(digest):
        raise BadRequest.bound(field, repr(content_hash)[:100], '"sha256:" and 64 hex digits')
    return digest


class ArtifactStore:
    """A folder of files that are named `<64 hex digits><suffix>`. Processes may share a folder.

    An unfinished file lies beside them as `<64 hex digits>.partial`, where the next attempt goes on with it.
    """

    def __init__(self, folder: Path, suffix: str = "") -> None:
        self.folder = folder.expanduser()
        self._suffix = suffix

    def path(self, digest: str) -> Path:
        """Return the path of an artifact, whether it is there or not."""
        return self.folder / f"{digest}{self._suffix}"

    def partial_path(self, digest: str) -> Path:
        """Return the path of the unfinished file of an artifact, whether it is there or not."""
        return self.folder / f"{digest}{atomic_files.PARTIAL}"

    def find(self, name: str) -> Path | None:
        """Return the file that is called `name`, with or without its suffix; None if it is not there.

        `name` may be any text from outside: what is no digest names no file.
        """
        digest = name.removesuffix(self._suffix)
        path = self.path(digest) if _DIGEST.fullmatch(digest) else None
        return path if path is not None and path.is_file() else None

    def verify(self, digest: str) -> bool:
        """Return whether an artifact is there and undamaged, by reading all of it."""
        try:
            return file_digest(self.path(digest)) == digest
        except OSError:
            return False

    def put(self, source: Path) -> str:
        """Copy a file in, unless it is there, for everybody to read. Returns its digest. Raises OSError."""
        digest = file_digest(source)
        path = self.path(digest)
        if not path.is_file():
            self.folder.mkdir(parents=True, exist_ok=True)
            with self.partial(digest) as file, source.open("rb") as original:
                file.truncate(0)
                shutil.copyfileobj(original, file)
                os.fchmod(file.fileno(), 0o644)
                self.finish(file, digest)
        return digest

    @contextlib.contextmanager
    def partial(self, digest: str) -> Iterator[BufferedRandom]:
        """Open the unfinished file of an artifact, locked, to be appended to. Raises OSError.

        It stays for the next attempt unless `finish` moves it. A private one, which does not stay, is opened if
        another process or task holds the lock.
        """
        shared = atomic_files.lock(self.partial_path(digest))
        if shared is not None:
            with shared:
                yield shared
            return
        private = self.folder / f"{digest}.{secrets.token_hex(4)}{atomic_files.PARTIAL}"
        with private.open("a+b") as file:
            try:
                yield file
            finally:
                private.unlink(missing_ok=True)

    def finish(self, partial: BufferedRandom, digest: str) -> Path:
        """Give the file from `partial`, whose content the caller has checked, its final name. Raises OSError."""
        path = self.path(digest)
        partial.flush()
        atomic_files.replace(Path(partial.name), path)
        return path

    def tidy(self, keep: Collection[str]) -> None:
        """Remove all artifacts, and what belongs to unfinished ones, but those with a digest in `keep`."""
        for path in self.folder.iterdir():
            digest = path.name.split(".")[0]
            if _DIGEST.fullmatch(digest) and digest not in keep:
                path.unlink(missing_ok=True)
