"""Keep the artifacts of targets on the device: fetched once from a verifier, checked before every use."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from pathlib import Path

from outrider.artifacts.download import download
from outrider.artifacts.store import ArtifactStore, digest_of
from outrider.core.errors import BadRequest

_MAX_BYTES = {"tokenizer": 256 << 20, "template": 1 << 20, "special_tokens": 1 << 20, "draft": 64 << 30}
"""The largest artifact of each role: what is read into memory is small, and nothing fills the disk unasked."""
_ATTEMPTS = 2
"""A file of an earlier process may have been damaged on disk, so one with a wrong hash is fetched once more."""
Fetch = Callable[[str, int], AsyncGenerator[bytes, None]]
"""(hash, offset) -> the bytes from there on. Raises core errors if no verifier can send them."""


@dataclass(frozen=True)
class ArtifactRef:
    """An artifact, as its verifier announces it."""

    role: str
    name: str
    hash: str
    """"sha256:<hex>" of the bytes"""
    size: int
    """bytes"""

    @property
    def digest(self) -> str:
        """Return the hash's hex digits. Raises BadRequest for another form, or for a size that its role cannot have."""
        digest = digest_of(self.hash, "artifact.hash")
        most = _MAX_BYTES.get(self.role, 0)
        if not 0 < self.size <= most:
            raise BadRequest.bound(f"size of the artifact {self.role}", self.size, f"between 1 and {most} bytes")
        return digest


class ArtifactCache:
    """Files under `root`, which processes may share."""

    def __init__(self, root: Path) -> None:
        self._store = ArtifactStore(root)

    async def get(self, ref: ArtifactRef, fetch: Fetch) -> Path:
        """Return the path of the checked file.

        Raises ModelRefused for bytes of the wrong hash, BadRequest for a directory that cannot be used, or what `fetch`
        raises; what had come by then is kept, and the next call resumes the download.
        """

        async def chunks(offset: int) -> AsyncGenerator[tuple[int, bytes], None]:
            async with contextlib.aclosing(fetch(ref.hash, offset)) as pieces:
                async for piece in pieces:
                    yield offset, piece
                    offset += len(piece)

        digest, name = ref.digest, f"{ref.role} {ref.name!r}"
        try:
            return await download(
                self._store, digest, ref.size, chunks, name=name, announced_by="its verifier", attempts=_ATTEMPTS
            )
        except OSError as error:
            raise BadRequest(
                f"the cache directory {self._store.folder} cannot hold {name} of {ref.size} bytes: {error}; "
                "free space there, or give another one with --cache-dir or OUTRIDER_EDGE_CACHE_DIR",
                field="cache_dir",
            ) from error
