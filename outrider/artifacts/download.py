"""Download an artifact into a store: resumed where it broke off, no longer than announced, hashed before it is used."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
from collections.abc import AsyncGenerator, Callable
from io import BufferedRandom
from pathlib import Path
from typing import Literal

from outrider.artifacts.store import ArtifactStore, file_digest
from outrider.core.errors import ModelRefused

log = logging.getLogger(__name__)

Source = Callable[[int], AsyncGenerator[tuple[int, bytes], None]]
"""Offset -> the chunks from there on, each with its position; the first position is less where a source cannot begin
at the offset. It raises its own errors when it breaks off."""
Reason = Literal["truncated", "too long", "altered"]

_WRITE_BYTES = 1 << 20
"""A thread writes this much at once: the event loop, which delivers tokens, does not wait for a disk."""
_SPARE_BYTES = 16 << 20
"""Bytes of the disk that a download leaves free."""


class DownloadRefused(ModelRefused):
    """A file that is not what was announced."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(message)
        self.reason: Reason = reason


async def download(
    store: ArtifactStore, digest: str, size: int, source: Source, *, name: str, announced_by: str, attempts: int = 1
) -> Path:
    """Return the path of an artifact, fetched from `source` unless the store has it undamaged.

    size: bytes of the whole file. name, announced_by: for messages, what it is and what says its size and hash.
    attempts: how often a file that is too long or has another hash is fetched, at least twice if the first attempt
    went on with what an earlier download had left.

    Raises DownloadRefused, or what the source raises; what has come is kept for the next call then, unless it was
    altered or too long. Raises OSError for a disk without room, and then nothing is kept.
    """
    path = store.path(digest)
    if await asyncio.to_thread(store.verify, digest):
        return path
    if path.exists():
        log.warning("%s is damaged in %s and is fetched again", name, store.folder)
    store.folder.mkdir(parents=True, exist_ok=True)
    with store.partial(digest) as file:
        partial = Path(file.name)
        if await asyncio.to_thread(store.verify, digest):  # another process has finished it meanwhile
            os.unlink(partial)
            return path
        try:
            left = max(attempts, 2 if file.seek(0, os.SEEK_END) else 1)
            while True:
                left -= 1
                try:
                    await _fill(file, size, source, name, announced_by)
                    if await asyncio.to_thread(file_digest, partial) != digest:
                        raise DownloadRefused(
                            "altered",
                            f"{name} has another SHA-256 than {announced_by} says (hash {digest[:12]}...): altered at "
                            "its source or on the way, it was thrown away unread",
                        )
                    return await asyncio.to_thread(store.finish, file, digest)
                except DownloadRefused as error:
                    if error.reason == "truncated" or not left:
                        raise
                    log.warning("%s; it is fetched again from the start", error)
                    file.truncate(0)
        except (DownloadRefused, OSError) as error:
            if not isinstance(error, DownloadRefused) or error.reason != "truncated":
                os.unlink(partial)
            raise


async def _fill(file: BufferedRandom, size: int, source: Source, name: str, announced_by: str) -> None:
    """Append what is missing. Raises DownloadRefused, OSError, or what the source raises."""
    held = file.seek(0, os.SEEK_END)
    if held >= size:
        return  # whether it is the right file is said by its hash
    free = shutil.disk_usage(Path(file.name).parent).free
    if size - held + _SPARE_BYTES > free:
        raise OSError(errno.ENOSPC, f"{size - held} bytes are to come, {free} are free")
    waiting = bytearray()
    try:
        async with contextlib.aclosing(source(held)) as chunks:
            async for position, chunk in chunks:
                if position < held and not waiting:
                    file.truncate(position)
                    held = position
                if position != held:
                    raise DownloadRefused("altered", f"{name}: bytes came from {position} on, asked for {held}")
                held += len(chunk)
                if held > size:
                    raise DownloadRefused(
                        "too long", f"{name} goes on beyond the {size} bytes that {announced_by} says"
                    )
                waiting += chunk
                if len(waiting) >= _WRITE_BYTES:
                    written, waiting = waiting, bytearray()
                    await asyncio.to_thread(file.write, written)
    finally:
        file.write(waiting)
        file.flush()
    if held < size:
        raise DownloadRefused(
            "truncated",
            f"{name} ended after {held} of {size} bytes; what has come is kept, and the next attempt goes on there",
        )
