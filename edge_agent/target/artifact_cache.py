"""A cache of artifacts by content hash: fetched once, resumed where a download broke off, checked before every use."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import logging
import os
import re
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterator
from dataclasses import dataclass
from io import BufferedRandom, BufferedReader
from pathlib import Path

from outrider.core.errors import BadRequest, ModelRefused

log = logging.getLogger(__name__)

_MAX_BYTES = {"tokenizer": 256 << 20, "template": 1 << 20, "special_tokens": 1 << 20, "draft": 64 << 30}
"""Per role: what is read into memory is small, and nothing fills the disk unasked."""
_HASH = re.compile(r"sha256:([0-9a-f]{64})")
Fetch = Callable[[str, int], AsyncGenerator[bytes, None]]
"""(hash, offset) -> the bytes from there on. Raises core errors where they cannot be had from anywhere."""


@dataclass(frozen=True)
class ArtifactRef:
    """An artifact as its verifier announces it."""

    role: str
    name: str
    hash: str
    """"sha256:<hex>" of the bytes"""
    size: int
    """bytes"""

    @property
    def digest(self) -> str:
        """The hex digits. Raises BadRequest for any other form: it becomes a file's name."""
        match = _HASH.fullmatch(self.hash)
        if match is None:
            raise BadRequest.bound("artifact.hash", repr(self.hash)[:100], '"sha256:" and 64 hex digits')
        most = _MAX_BYTES.get(self.role, 0)
        if not 0 < self.size <= most:
            raise BadRequest.bound(f"size of the artifact {self.role}", self.size, f"between 1 and {most} bytes")
        return match[1]


class ArtifactCache:
    """Files under `root`, named by their hash. Processes may share one; files appear whole or not at all."""

    def __init__(self, root: Path) -> None:
        self._root = root

    async def get(self, ref: ArtifactRef, fetch: Fetch) -> Path:
        """The path of the checked file.

        Raises ModelRefused for bytes of the wrong hash, BadRequest for a directory that cannot be used, or what `fetch`
        raises; what had come by then is kept, and the next try goes on there.
        """
        path = self._root / ref.digest
        try:
            return await self._get(path, ref, fetch)
        except OSError as error:
            raise BadRequest(
                f"the cache directory {self._root} cannot hold {ref.role} {ref.name!r} of {ref.size} bytes: {error}; "
                "mend that, or give another one with --cache-dir or OUTRIDER_EDGE_CACHE_DIR",
                field="cache_dir",
            ) from error

    async def _get(self, path: Path, ref: ArtifactRef, fetch: Fetch) -> Path:
        if await asyncio.to_thread(_is_whole, path, ref):
            return path
        self._root.mkdir(parents=True, exist_ok=True)
        for attempt in range(2):
            with _partial(path) as file:
                if await asyncio.to_thread(_is_whole, path, ref):  # another was at it, and has finished meanwhile
                    os.unlink(file.name)
                    return path
                await self._fill(file, ref, fetch)
                if await asyncio.to_thread(_hash_of, file) == ref.digest:
                    os.fsync(file.fileno())
                    os.replace(file.name, path)
                    return path
                file.truncate(0)  # what broke off earlier may have been damaged on disk: once more from the start
            log.warning("%s %s has the wrong hash%s", ref.role, ref.name, "; fetching it again" if not attempt else "")
        raise ModelRefused(
            f"{ref.role} {ref.name!r} does not have the hash that its verifier announced ({ref.hash[:20]}...); "
            "the verifier's file has changed since it started, or something on the way alters it"
        )

    async def _fill(self, file: BufferedRandom, ref: ArtifactRef, fetch: Fetch) -> None:
        """Download from where the file ends to its announced size."""
        offset = file.seek(0, os.SEEK_END)
        if offset < ref.size:
            async with contextlib.aclosing(fetch(ref.hash, offset)) as chunks:
                async for chunk in chunks:
                    file.write(chunk)
                    if file.tell() > ref.size:
                        break  # the hash will tell
        file.truncate(min(file.seek(0, os.SEEK_END), ref.size))


@contextlib.contextmanager
def _partial(path: Path) -> Iterator[BufferedRandom]:
    """The unfinished download, kept for the next try; a private one where another client is at it."""
    shared = _locked(path.with_name(path.name + ".partial"))
    if shared is not None:
        with shared:
            yield shared
        return
    handle, private = tempfile.mkstemp(prefix=f"{path.name}.", suffix=".partial", dir=path.parent)
    os.close(handle)
    with open(private, "w+b") as file:
        try:
            yield file
        finally:
            Path(private).unlink(missing_ok=True)


def _locked(path: Path) -> BufferedRandom | None:
    """The file, locked; None where somebody else holds it.

    Between opening and locking its owner may have moved it to its final name: then what was locked is the finished
    file, which nobody may write to any more.
    """
    while True:
        file = open(path, "a+b")  # noqa: SIM115 - it is handed on, locked
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, path):
                return file
        except OSError:
            file.close()
            return None
        file.close()


def _is_at(file: BufferedRandom, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False


def _is_whole(path: Path, ref: ArtifactRef) -> bool:
    """Whether the cached file is there and undamaged; a damaged one is removed."""
    try:
        with path.open("rb") as file:
            if _hash_of(file) == ref.digest:
                return True
    except FileNotFoundError:
        return False
    log.warning("the cached %s %s is damaged; fetching it again", ref.role, path.name)
    path.unlink(missing_ok=True)
    return False


def _hash_of(file: BufferedRandom | BufferedReader) -> str:
    file.flush()
    file.seek(0)
    return hashlib.file_digest(file, "sha256").hexdigest()
