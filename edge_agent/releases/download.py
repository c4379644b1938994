"""Download a release's file over HTTP, from the first of its addresses that has it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import re
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING
from urllib.parse import urljoin, urlsplit

from edge_agent.releases.check import ReleaseRefused
from outrider.artifacts.download import DownloadRefused, download
from outrider.artifacts.store import ArtifactStore

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

_LEAST_RATE = 1024.0
"""Bytes a second that a server must send over `stall_s`: a slower one would keep others from being asked."""
_MAX_REDIRECTS = 3
_MAX_ETAG = 256
_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+|\*)")


@dataclass(frozen=True)
class ReleaseFile:
    """A release's file as its manifest announces it."""

    digest: str
    """SHA-256 in hex."""
    size: int
    """In bytes."""
    urls: tuple[str, ...]
    """URLs to fetch it from, in this order."""


def download_urls(urls: Sequence[str], base_url: str, digest: str) -> tuple[str, ...]:
    """Return the addresses of a release's file: the manifest's own, then the one where coordinators serve it.

    urls: those of the manifest, of which relative ones begin with `base_url`.
    """
    base = f"{base_url.rstrip('/')}/" if base_url else ""
    named = [_join(base, url) for url in (*urls, f"artifacts/{digest}.gguf")]
    return tuple(dict.fromkeys(url for url in named if url))


def _join(base: str, url: str) -> str:
    """Join an address with its base; return "" for what is not an http address."""
    try:
        joined = urljoin(base, url)
        return joined if urlsplit(joined).scheme in ("http", "https") else ""
    except ValueError:
        return ""


class Downloader:
    """Fetches files into one store, one at a time.

    stall_s: how long a server may send next to nothing. ca: PEM file of authorities to trust beside the public ones.
    """

    def __init__(
        self, store: ArtifactStore, stall_s: float, clock: Callable[[], float] = time.monotonic, ca: Path | None = None
    ) -> None:
        self._store = store
        self._stall_s = stall_s
        self._clock = clock
        self._ca = ca
        self._altering: set[str] = set()
        """Addresses that have sent other bytes than were signed: they are asked last."""

    async def fetch(self, file: ReleaseFile) -> None:
        """Put the whole file into the store. A part of it is kept where the download breaks off, and resumed next time.

        Raises ReleaseRefused with the reason of the last address, OSError for a disk without room.
        """
        if not file.urls:
            raise ReleaseRefused(
                "unreachable",
                f"release {file.digest[:12]} names no http address, and the coordinator serves none; start it with "
                "--artifacts, or publish the release with absolute URLs",
            )
        refused: ReleaseRefused | None = None
        for url in sorted(file.urls, key=self._altering.__contains__):
            try:
                return await self._from(url, file)
            except ReleaseRefused as error:
                if error.kind in ("altered", "too long"):
                    self._altering.add(url)
                log.info("release %s from %s: %s", file.digest[:12], url, error)
                # That one server has altered the file says more than that the next one cannot be reached.
                refused = error if refused is None or error.kind != "unreachable" else refused
        raise refused or ReleaseRefused("unreachable", "there was no address")

    async def _from(self, url: str, file: ReleaseFile) -> None:
        """Fetch what is missing from one address. Raises ReleaseRefused, or OSError for a disk without room."""
        try:
            await download(
                self._store,
                file.digest,
                file.size,
                lambda offset: self._chunks(url, file, offset),
                name=f"release {file.digest[:12]} from {url}",
                announced_by="its signed manifest",
            )
        except DownloadRefused as error:
            raise ReleaseRefused(error.reason, str(error)) from error
        finally:
            if not self._store.partial_path(file.digest).exists():
                self._etag(file).unlink(missing_ok=True)

    async def _chunks(self, url: str, file: ReleaseFile, offset: int) -> AsyncGenerator[tuple[int, bytes], None]:
        """Yield the file's bytes with their positions, from `offset` on or from the start.

        Raises ReleaseRefused or DownloadRefused.
        """
        httpx, etag = _httpx(), self._etag(file)
        begun = position = offset
        try:
            trusted = await asyncio.to_thread(_trust, self._ca)
            timeout, redirects = httpx.Timeout(self._stall_s), _MAX_REDIRECTS
            async with httpx.AsyncClient(
                timeout=timeout, follow_redirects=True, max_redirects=redirects, verify=trusted
            ) as client:
                # httpx bounds each read alone, so a server that drips its headers would never be given up.
                async with asyncio.timeout(self._stall_s * (1 + _MAX_REDIRECTS)):
                    request = client.build_request("GET", url, headers=_headers(offset, url, etag))
                    answer = await client.send(request, stream=True)
                async with contextlib.aclosing(answer):
                    begun = position = _first_byte(answer, offset, file)
                    _remember(etag, url, answer.headers.get("etag", ""))
                    async for piece in self._steady(answer.aiter_raw()):
                        yield position, piece
                        position += len(piece)
        except (httpx.HTTPError, httpx.InvalidURL, TimeoutError) as error:
            raise ReleaseRefused(
                "truncated" if position > begun else "unreachable",
                f"release {file.digest[:12]} from {url} broke off after {position} of {file.size} bytes "
                f"({type(error).__name__}: {error}); what has come is kept, and the next try goes on there",
            ) from error

    async def _steady(self, pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Pass a body on. Raises ReleaseRefused once it comes more slowly than `_LEAST_RATE`."""
        since, came = self._clock(), 0
        async for piece in pieces:
            yield piece
            came += len(piece)
            if (passed := self._clock() - since) > self._stall_s:
                if came < _LEAST_RATE * passed:
                    raise ReleaseRefused("truncated", f"it came too slowly: {came} bytes in {passed:.1f} s")
                since, came = self._clock(), 0

    def _etag(self, file: ReleaseFile) -> Path:
        return self._store.folder / f"{file.digest}.etag"


def _first_byte(answer: httpx.Response, offset: int, file: ReleaseFile) -> int:
    """Return the position at which a body begins. Raises ReleaseRefused or DownloadRefused if it is not the file's."""
    if answer.status_code == 416:
        raise DownloadRefused("altered", f"{answer.url} has no bytes from {offset} on, must have {file.size}")
    if answer.status_code not in (200, 206):
        raise ReleaseRefused("unreachable", f"{answer.url} answered with status {answer.status_code}, must be 200")
    start, total = 0, answer.headers.get("content-length", "")
    if answer.status_code == 206:
        match = _RANGE.fullmatch(answer.headers.get("content-range", ""))
        if match is None:
            raise ReleaseRefused("altered", f"{answer.url} sent a part of the file without saying which")
        start, total = int(match[1]), match[3]
    if total.isdigit() and int(total) > file.size:
        raise DownloadRefused(
            "too long", f"{answer.url} has {total} bytes, the signed manifest says {file.size}: nothing was read"
        )
    return start


def _headers(offset: int, url: str, etag: Path) -> dict[str, str]:
    """Return the request's headers. Ranges count the file's own bytes, so no compression is accepted."""
    headers = {"accept-encoding": "identity"}
    if offset:
        headers["range"] = f"bytes={offset}-"
        with contextlib.suppress(OSError, UnicodeDecodeError):
            known, _, tag = etag.read_text().partition("\n")
            if tag and known == _url_digest(url):
                headers["if-range"] = tag
    return headers


def _remember(path: Path, url: str, tag: str) -> None:
    """Keep a strong ETag, by which the server can tell whether its file is still the one that was begun with."""
    if tag and not tag.startswith("W/") and len(tag) <= _MAX_ETAG and tag.isprintable():
        path.write_text(f"{_url_digest(url)}\n{tag}")
    else:
        path.unlink(missing_ok=True)


def _url_digest(url: str) -> str:
    return hashlib.sha256(url.encode()).hexdigest()


def _trust(ca: Path | None) -> ssl.SSLContext:
    """Return a TLS context with the public authorities and those in `ca`. Raises ReleaseRefused if it has none."""
    context: ssl.SSLContext = _httpx().create_ssl_context()
    if ca is not None:
        try:
            context.load_verify_locations(ca)
        except OSError as error:
            raise ReleaseRefused(
                "unreachable", f"no server can be trusted by the authorities in {ca}: {error}; correct that file"
            ) from error
    return context


def _httpx() -> ModuleType:
    try:
        import httpx
    except ImportError as error:
        raise ImportError("releases are fetched with httpx: pip install 'outrider[edge]'") from error
    return httpx
