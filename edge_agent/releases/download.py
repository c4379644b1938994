"""A release's file over HTTP: resumed where it broke off, no longer than announced, hashed before it gets its name."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import os
import re
import shutil
import ssl
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

from edge_agent.releases.check import ReleaseRefused
from edge_agent.releases.store import is_whole, put

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

_LEAST_RATE = 1024.0
"""Bytes a second that a server must bring over `stall_s`: one that drips keeps others from being asked."""
_MAX_REDIRECTS = 3
_WRITE_BYTES = 1 << 20
"""So much is written at once, by a thread: the loop that delivers tokens waits for no disk."""
_ROOM_LEFT = 16 << 20
"""Bytes of the disk that a download leaves to others."""
_MAX_ETAG = 256
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


@dataclass(frozen=True)
class Wanted:
    """A file as its manifest announces it."""

    digest: str
    """SHA-256 in hex."""
    size: int
    """Bytes."""
    urls: tuple[str, ...]


def absolute(urls: Sequence[str], base_url: str, digest: str) -> tuple[str, ...]:
    """Where to ask, in this order: relative URLs begin with base_url; last comes where coordinators have it."""
    base = f"{base_url.rstrip('/')}/" if base_url else ""
    named = [_joined(base, url) for url in (*urls, f"artifacts/{digest}.gguf")]
    return tuple(dict.fromkeys(url for url in named if url))


def _joined(base: str, url: str) -> str:
    """Empty for what is no http address."""
    try:
        joined = urljoin(base, url)
        return joined if urlsplit(joined).scheme in ("http", "https") else ""
    except ValueError:
        return ""


class Downloader:
    """Fetches files into one folder, one at a time.

    stall_s: how long a server may bring nothing to speak of. ca: PEM file of authorities beside the public ones.
    """

    def __init__(
        self, folder: Path, stall_s: float, clock: Callable[[], float] = time.monotonic, ca: Path | None = None
    ) -> None:
        self._folder = folder
        self._stall_s = stall_s
        self._clock = clock
        self._ca = ca
        self._bad: set[str] = set()
        """Addresses that have brought other bytes than were signed: they are asked last."""

    async def fetch(self, wanted: Wanted, path: Path) -> None:
        """Put the whole file at `path`. What has come is kept where it breaks off, and the next call goes on there.

        Raises ReleaseRefused with what was wrong at the last address, OSError for a disk without room.
        """
        if await asyncio.to_thread(is_whole, path, wanted.digest):
            return
        if not wanted.urls:
            raise ReleaseRefused(
                "unreachable",
                f"release {wanted.digest[:12]} names no http address, and the coordinator serves none; start it with "
                "--artifacts, or publish the release with absolute URLs",
            )
        await asyncio.to_thread(self._check_room, wanted)
        refused: ReleaseRefused | None = None
        for url in sorted(wanted.urls, key=self._bad.__contains__):
            try:
                await self._whole(url, wanted, path)
                return
            except ReleaseRefused as error:
                if error.kind in ("altered", "too long"):
                    self._bad.add(url)
                log.info("release %s from %s: %s", wanted.digest[:12], url, error)
                # What one server alters says more than that the next one cannot be reached.
                refused = error if refused is None or error.kind != "unreachable" else refused
        raise refused or ReleaseRefused("unreachable", "there was no address")

    def _check_room(self, wanted: Wanted) -> None:
        """Raises OSError where the disk has none for what is missing, and then gives back what an earlier try took."""
        partial, etag = self._partial(wanted)
        missing = wanted.size - (partial.stat().st_size if partial.exists() else 0)
        free = shutil.disk_usage(self._folder).free
        if missing + _ROOM_LEFT > free:
            partial.unlink(missing_ok=True)
            etag.unlink(missing_ok=True)
            raise OSError(errno.ENOSPC, f"{missing} bytes are to come, {free} are free")

    async def _whole(self, url: str, wanted: Wanted, path: Path) -> None:
        """Once more from the start where what an earlier try has left was not what this server has."""
        resumed = self._partial(wanted)[0].exists()
        try:
            await self._from(url, wanted)
            await self._finish(url, wanted, path)
        except ReleaseRefused as error:
            if not resumed or error.kind not in ("altered", "too long"):
                raise
            await self._from(url, wanted)
            await self._finish(url, wanted, path)

    async def _finish(self, url: str, wanted: Wanted, path: Path) -> None:
        partial, etag = self._partial(wanted)
        if not await asyncio.to_thread(is_whole, partial, wanted.digest):
            partial.unlink(missing_ok=True)
            etag.unlink(missing_ok=True)
            raise ReleaseRefused(
                "altered",
                f"the file of release {wanted.digest[:12]} from {url} has another SHA-256 than its signed manifest "
                "says; it was altered on its server or on the way, and was thrown away unread",
            )
        await asyncio.to_thread(put, partial, path)
        etag.unlink(missing_ok=True)

    async def _from(self, url: str, wanted: Wanted) -> None:
        """All that is missing, from one address. Raises OSError for a full disk, and then gives back what it took."""
        partial = self._partial(wanted)[0]
        try:
            with partial.open("a+b") as file:
                await self._ask(url, wanted, file)
        except OSError:
            partial.unlink(missing_ok=True)
            raise

    async def _ask(self, url: str, wanted: Wanted, file: BufferedRandom) -> None:
        httpx = _httpx()
        offset = begun = file.seek(0, os.SEEK_END)
        if offset >= wanted.size:
            return  # the hash will tell
        etag = self._partial(wanted)[1]
        try:
            async with httpx.AsyncClient(
                timeout=httpx.Timeout(self._stall_s),
                follow_redirects=True,
                max_redirects=_MAX_REDIRECTS,
                verify=await asyncio.to_thread(_trust, self._ca),
            ) as client:
                # A server that drips its headers is no better than one that is silent: httpx bounds each read alone.
                async with asyncio.timeout(self._stall_s * (1 + _MAX_REDIRECTS)):
                    request = client.build_request("GET", url, headers=_headers(offset, url, etag))
                    answer = await client.send(request, stream=True)
                try:
                    self._begin(answer, file, offset, wanted)
                    begun = file.seek(0, os.SEEK_END)  # less where it came from the start again
                    _remember(etag, url, answer.headers.get("etag", ""))
                    await self._fill(answer.aiter_raw(), file, wanted)
                finally:
                    await answer.aclose()
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            held = file.seek(0, os.SEEK_END)
            raise ReleaseRefused(
                "truncated" if held > begun else "unreachable",
                f"release {wanted.digest[:12]} from {url} broke off after {held} of {wanted.size} bytes "
                f"({type(error).__name__}: {error}); what has come is kept, and the next try goes on there",
            ) from error

    def _begin(self, answer: httpx.Response, file: BufferedRandom, offset: int, wanted: Wanted) -> None:
        """Set the file to where the body begins. Raises ReleaseRefused for an answer that cannot be it."""
        if answer.status_code == 416:
            file.truncate(0)
            raise ReleaseRefused("truncated", f"{answer.url} has no bytes from {offset} on; it is asked afresh next")
        if answer.status_code not in (200, 206):
            raise ReleaseRefused("unreachable", f"{answer.url} answered with status {answer.status_code}, must be 200")
        start, total = 0, answer.headers.get("content-length", "")
        if answer.status_code == 206:
            start, total = _range(answer)
            if start != offset:
                raise ReleaseRefused("altered", f"{answer.url} sent bytes from {start} on, asked for {offset}")
        if total.isdigit() and int(total) > wanted.size:
            raise ReleaseRefused(
                "too long", f"{answer.url} has {total} bytes, the signed manifest says {wanted.size}: nothing was read"
            )
        if start < offset:
            file.truncate(start)

    async def _fill(self, pieces: AsyncIterator[bytes], file: BufferedRandom, wanted: Wanted) -> None:
        held = file.seek(0, os.SEEK_END)
        mark, marked, waiting = self._clock(), held, bytearray()
        try:
            async for piece in pieces:
                held += len(piece)
                if held > wanted.size:
                    break
                waiting += piece
                if len(waiting) >= _WRITE_BYTES:
                    written, waiting = waiting, bytearray()
                    await asyncio.to_thread(file.write, written)
                if (passed := self._clock() - mark) > self._stall_s:
                    if held - marked < _LEAST_RATE * passed:
                        raise ReleaseRefused(
                            "truncated", f"release {wanted.digest[:12]} came too slowly: {held} bytes yet"
                        )
                    mark, marked = self._clock(), held
        finally:
            file.write(waiting)
            file.flush()
        if held > wanted.size:
            file.truncate(0)
            raise ReleaseRefused(
                "too long", f"release {wanted.digest[:12]} went on beyond the {wanted.size} bytes of its manifest"
            )
        if held < wanted.size:
            raise ReleaseRefused(
                "truncated",
                f"release {wanted.digest[:12]} ended after {held} of {wanted.size} bytes; what has come is kept, and "
                "the next try goes on there",
            )

    def _partial(self, wanted: Wanted) -> tuple[Path, Path]:
        return self._folder / f"{wanted.digest}.partial", self._folder / f"{wanted.digest}.etag"


def _headers(offset: int, url: str, etag: Path) -> dict[str, str]:
    """Ranges are of the bytes themselves, so nothing may be compressed on the way."""
    headers = {"accept-encoding": "identity"}
    if offset:
        headers["range"] = f"bytes={offset}-"
        known, _, tag = _read(etag).partition("\n")
        if tag and known == _mark(url):
            headers["if-range"] = tag
    return headers


def _remember(path: Path, url: str, tag: str) -> None:
    """A strong ETag, which says whether the server's file is the one that was begun with."""
    if tag and not tag.startswith("W/") and len(tag) <= _MAX_ETAG and tag.isprintable():
        path.write_text(f"{_mark(url)}\n{tag}")
    else:
        path.unlink(missing_ok=True)


def _mark(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return ""


def _range(answer: httpx.Response) -> tuple[int, str]:
    """(first byte, bytes of the whole file or "*") of a partial answer."""
    match = _RANGE.fullmatch(answer.headers.get("content-range", ""))
    if match is None:
        raise ReleaseRefused("altered", f"{answer.url} sent a part of the file without saying which")
    return int(match[1]), match[3]


def _trust(ca: Path | None) -> ssl.SSLContext:
    """The public authorities and the cluster's own. Raises ReleaseRefused for a file that holds none."""
    context: ssl.SSLContext = _httpx().create_ssl_context()
    if ca is not None:
        try:
            context.load_verify_locations(ca)
        except OSError as error:
            raise ReleaseRefused(
                "unreachable", f"no server can be trusted with the authorities in {ca}: {error}; mend the file"
            ) from error
    return context


def _httpx() -> ModuleType:
    try:
        import httpx
    except ImportError as error:
        raise ImportError("releases are fetched with httpx: pip install 'outrider[edge]'") from error
    return httpx
