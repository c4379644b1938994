"""Download a release's file over HTTP, from the first of its URLs that serves it intact."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import urllib.request
from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Literal
from urllib.parse import urljoin, urlsplit

from outrider.artifacts.download import DownloadRefused, download
from outrider.artifacts.store import ArtifactStore
from outrider.core.errors import ModelRefused
from outrider.wire.channels import ClientTls, is_loopback

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

STALL_S = 20.0
"""Seconds after which the next URL is tried, where a server sends nothing."""
_RANGE = re.compile(r"bytes (\d+)-")

RefusalKind = Literal[
    "signature", "manifest", "target", "tokenizer", "version", "size",  # by its manifest
    "unreachable", "truncated", "too long", "altered", "no room",  # by its file
    "unusable", "vocabulary",  # by what loading it showed
]  # fmt: skip
"""Why a release was refused."""


class ReleaseRefused(ModelRefused):
    """This device does not use a release; sessions go on with the draft that they have."""

    def __init__(self, kind: RefusalKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def download_urls(urls: Sequence[str], base_url: str, digest: str) -> tuple[str, ...]:
    """Return the URLs of a release's file: those of the manifest, then the one at which the coordinator serves it.

    urls: those of the manifest; relative ones are resolved against `base_url`.
    """
    base = f"{base_url.rstrip('/')}/" if base_url else ""
    absolute = [_join(base, url) for url in (*urls, f"artifacts/{digest}.gguf")]
    return tuple(dict.fromkeys(url for url in absolute if url))


def _join(base: str, url: str) -> str:
    """Resolve a URL against its base; return "" if the result is not an HTTP URL."""
    try:
        joined = urljoin(base, url)
        return joined if urlsplit(joined).scheme in ("http", "https") else ""
    except ValueError:
        return ""


async def fetch(store: ArtifactStore, digest: str, size: int, urls: Sequence[str], tls: ClientTls) -> None:
    """Download a whole file into a store. If the download breaks off, the next call resumes it.

    digest: SHA-256 in hex. size: in bytes. urls: to try, in this order; one that serves another file is asked twice.
    tls: authorities trusted beside public ones, and the device's certificate.
    Raises ReleaseRefused if every URL failed, with the last reason other than "unreachable" if there is one, and
    OSError if the disk is full.
    """
    refused: ReleaseRefused | None = None
    for url in urls:
        try:
            await download(
                store,
                digest,
                size,
                lambda offset: _chunks(url, digest, size, offset, tls),  # noqa: B023
                name=f"release {digest[:12]} from {url}",
                announced_by="its signed manifest",
                attempts=2,
            )
            return
        except (ReleaseRefused, DownloadRefused) as broken:
            error = broken if isinstance(broken, ReleaseRefused) else ReleaseRefused(broken.reason, str(broken))
            log.info("release %s from %s: %s", digest[:12], url, error)
            # A server that altered the file is a more useful reason than another that cannot be reached.
            if refused is None or error.kind != "unreachable":
                refused = error
    raise refused or ReleaseRefused(
        "unreachable",
        f"release {digest[:12]} names no HTTP URL, and the coordinator serves none; start the "
        "coordinator with --artifacts, or publish the release with absolute URLs",
    )


async def _chunks(
    url: str, digest: str, size: int, offset: int, tls: ClientTls
) -> AsyncGenerator[tuple[int, bytes], None]:
    """Yield (position, bytes) of a file, from `offset` on, or from 0 if the server does not resume there.

    Raises ReleaseRefused, DownloadRefused, or ImportError without httpx.
    """
    try:
        import httpx
    except ImportError as error:
        raise ImportError("releases are fetched with httpx: pip install 'outrider[edge]'") from error

    start = position = offset
    # Compression is not accepted, since a range counts the bytes of the file itself.
    headers = {"accept-encoding": "identity"} | ({"range": f"bytes={offset}-"} if offset else {})
    try:
        direct, proxy = _way(url)
        trusting = await asyncio.to_thread(lambda: _trusting(httpx.create_ssl_context(), tls))
        async with (
            httpx.AsyncClient(timeout=STALL_S, follow_redirects=True, verify=trusting, trust_env=not direct) as client,
            client.stream("GET", url, headers=headers) as answer,
        ):
            start = position = _start_position(answer, offset, size)
            async for piece in answer.aiter_raw():
                yield position, piece
                position += len(piece)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise ReleaseRefused(
            "truncated" if position > start else "unreachable",
            f"release {digest[:12]} from {url} broke off after {position} of {size} bytes "
            f"({type(error).__name__}: {error}){proxy}; these are kept, and the next try resumes there",
        ) from error


def _way(url: str) -> tuple[bool, str]:
    """Return whether a URL is of this machine, which no proxy of the environment reaches, and which one is used else,
    for messages."""
    parts = urlsplit(url)
    if is_loopback(f"[{parts.hostname}]:1"):
        return True, ""
    proxies = {} if urllib.request.proxy_bypass(parts.hostname or "") else urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    return False, f" through the proxy {proxy} of the environment" if proxy else ""


def _start_position(answer: httpx.Response, offset: int, size: int) -> int:
    """Return the file position at which a body starts. Raises ReleaseRefused or DownloadRefused if it has none."""
    if answer.status_code == 416:
        raise DownloadRefused("altered", f"{answer.url} has no bytes from {offset} on, must have {size}")
    if answer.status_code not in (200, 206):
        raise ReleaseRefused("unreachable", f"{answer.url} answered with status {answer.status_code}, must be 200")
    if answer.status_code == 200:
        return 0
    match = _RANGE.match(answer.headers.get("content-range", ""))
    if match is None:
        raise ReleaseRefused("altered", f"{answer.url} sent a part of the file without saying which")
    return int(match[1])


def _trusting(context: ssl.SSLContext, tls: ClientTls) -> ssl.SSLContext:
    """Return the context of public authorities, which trusts `tls` too. Raises ReleaseRefused for a wrong file."""
    try:
        if tls.ca is not None:
            context.load_verify_locations(tls.ca)
        if tls.cert is not None:
            context.load_cert_chain(tls.cert, tls.key)
    except OSError as error:
        wrong = f"cannot load {tls.ca} or {tls.cert}" if tls.cert else f"cannot load {tls.ca}"
        raise ReleaseRefused("unreachable", f"{wrong}: {error}; correct that file") from error
    return context
