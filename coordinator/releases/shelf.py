"""The folder of draft files that the coordinator serves: each is named by its content."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
from pathlib import Path

from outrider.core.errors import BadRequest
from outrider.wire.manifest import Manifest

_NAME = re.compile(r"([0-9a-f]{64})(?:\.gguf)?")


class Shelf:
    """`FOLDER/<64 hex digits>.gguf`, put there whole by publishers. A file never changes once it is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.expanduser()
        self._hashing: dict[tuple[str, int, int], asyncio.Task[str]] = {}

    def find(self, name: str) -> Path | None:
        """The file that a URL's last part names, with or without its suffix; None for any other name."""
        named = _NAME.fullmatch(name)
        path = self.folder / f"{named[1]}.gguf" if named else None
        return path if path is not None and path.is_file() else None

    async def check(self, manifest: Manifest) -> None:
        """Raises BadRequest where a device would not get here what the manifest says.

        A file that is only elsewhere, by absolute URLs, is not looked at.
        """
        path = self.find(manifest.digest)
        if path is None:
            if manifest.urls and all("://" in url for url in manifest.urls):
                return
            raise BadRequest(
                f"{manifest.digest}.gguf is not in {self.folder}, from where devices would fetch it; put it there"
                " first, or name in the manifest where it is",
                field="manifest.artifact",
            )
        size = (await asyncio.to_thread(os.stat, path)).st_size
        if size != manifest.size:
            raise BadRequest.bound("manifest.size", manifest.size, f"{size} bytes, as {path.name} has")
        found = await self._digest(path)
        if found != manifest.digest:
            raise BadRequest(
                f"{path} is damaged or another file: its SHA-256 is {found}; put the right one there",
                field="manifest.artifact",
            )

    async def _digest(self, path: Path) -> str:
        """Off the event loop, and to its end even if the caller gives up: then it is known when he asks again."""
        stat = await asyncio.to_thread(os.stat, path)
        key = (path.name, stat.st_size, stat.st_mtime_ns)
        if key not in self._hashing:
            self._hashing[key] = asyncio.create_task(asyncio.to_thread(_sha256, path))
        task = self._hashing[key]
        try:
            return await asyncio.shield(task)
        except OSError as error:
            raise BadRequest(f"{path} cannot be read: {error.strerror}", field="manifest.artifact") from error
        finally:
            if task.done():  # others may wait for it too, and the first of them has taken it out
                self._hashing.pop(key, None)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
