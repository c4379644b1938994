"""Follow the draft releases that the coordinator offers: ask when there is news, and take what passes the checks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from edge_agent.drafting.manager import DraftManager
from edge_agent.drafting.pool import DraftPool
from edge_agent.releases.check import TRANSIENT, ReleaseRefused, check, manifest_digest, signing_key_id
from edge_agent.releases.download import Downloader, ReleaseFile, download_urls
from edge_agent.releases.loader import RefusalLog, ReleaseLoader
from edge_agent.releases.state import InstalledRelease, ReleaseState
from outrider.core.backoff import Backoff
from outrider.core.errors import OutriderError
from outrider.wire.channels import ClientTls
from outrider.wire.ticket import Target
from outrider.wire.v1 import coordinator_pb2 as pb

log = logging.getLogger(__name__)

RETRY_FIRST_S, RETRY_MAX_S = 5.0, 600.0
"""The pauses after what failed, at first and at most."""
_RETIRE_S = 10.0
"""Time that a third draft waits for sessions to leave the first one, before it is put off."""
SPREAD_S = 2.0
"""Time within which a device asks for a new release at a random moment, so that not all devices ask at once."""
_LOWER_SERIAL_S = 5.0
"""Pause before the coordinator is asked about a serial below the known one, which a verifier that lags may send."""
_RECHECKS = 2
"""Most times that the coordinator is asked again where it knows of less than a notice said: another may be ahead."""
_MAX_ALTERED = 2
"""Most times that a whole file is fetched in vain before the next news is waited for."""


@dataclass(frozen=True)
class UpdateOptions:
    """Which releases this device takes, and how it fetches them."""

    keys: Mapping[str, bytes]
    """Key id -> raw public key of the trusted publishers."""
    root: Path
    """Folder of all targets' releases."""
    tls: ClientTls | None = None
    """The cluster's authorities, since the coordinator serves files with its own certificate, and the device's one."""


Ask = Callable[[str, str, str], Awaitable[pb.OfferReleaseResponse]]
"""(weights hash of the target, device id, release in use) -> what the coordinator offers. Raises core errors."""

Fallback = Callable[[], DraftPool | None]
"""Returns what is used without a release: n-grams, or None for nothing."""

_Outcome = Literal["settled", "retry", "recheck", "news"]
"""The result of handling an offer: it is in use or never will be; it may be taken later; its file has come, so the
coordinator is asked whether it is still offered; there is a newer offer."""


class OfferFollower:
    """Follows the offers: asks for one whenever there is news, and makes the client's drafts follow it."""

    def __init__(
        self,
        options: UpdateOptions,
        ask: Ask,
        target: Target,
        loader: ReleaseLoader,
        refusals: RefusalLog,
        drafts: DraftManager,
        fallback: Fallback,
    ) -> None:
        self._options = options
        self._ask = ask
        self._target = target
        self._loader = loader
        self._refusals = refusals
        self._drafts = drafts
        self._fallback = fallback
        self._downloader = Downloader(loader.folder.files, options.tls)
        self._wake = asyncio.Event()
        self._news = asyncio.Event()
        """Set by a notice since the coordinator was asked last."""
        self._noticed, self._settled = 0, -1
        """Serials of the latest notice and of the last settled offer. Where they differ the coordinator is asked."""
        self._not_before = 0.0
        self._rechecks = 0
        self._retry = Backoff(first_s=RETRY_FIRST_S, max_s=RETRY_MAX_S)
        self._altered: Counter[str] = Counter()
        """Fetches in vain by manifest digest."""

    def notice(self, serial: int) -> None:
        """Note a serial that somebody mentioned. It is only a reason to ask: what the coordinator answers counts."""
        if serial > self._noticed:
            self._noticed, self._not_before = serial, 0.0
            self._retry.retry_now()
            self._news.set()
        elif serial < self._noticed == self._settled:
            self._noticed, self._not_before = serial, time.monotonic() + _LOWER_SERIAL_S
        self._wake.set()

    async def run(self) -> None:
        """Follow offers until cancelled."""
        while True:
            try:
                if self._noticed != self._settled and not self._wait_s:
                    await self._update()
            except Exception as error:
                log.exception("draft releases are tried again later: %s", error)
                self._retry.failed()
            await self._pause()

    @property
    def _wait_s(self) -> float:
        return max(self._retry.due_in_s, self._not_before - time.monotonic(), 0.0)

    async def _pause(self) -> None:
        """Wait until there is something to ask for."""
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.01, self._wait_s) if self._noticed != self._settled else None):
                await self._wake.wait()

    # --- what is offered

    async def _update(self) -> None:
        """Ask the coordinator for its offer, and take or refuse it."""
        if self._settled >= 0:
            await asyncio.sleep(random.uniform(0.0, SPREAD_S))
        outcome: _Outcome = "recheck"
        while outcome == "recheck":
            noticed = self._noticed
            self._news.clear()
            try:
                offer = await self._ask(self._target.weights_hash, self._loader.state.device_id, self._in_use)
            except OutriderError as error:
                log.info("the coordinator could not say which release to use: %s", error)
                outcome = "retry"
                break
            try:
                outcome = await self._take(offer)
            except ReleaseRefused as error:
                outcome = await self._on_refused(offer, error)
        if outcome == "retry":
            self._retry.failed()
        elif outcome == "settled":
            self._settle(offer.serial, noticed)

    def _settle(self, serial: int, noticed: int) -> None:
        """Note that the offer of this serial is dealt with. noticed: the latest notice before it was asked for."""
        if self._noticed != noticed:
            self._settled = serial  # there is news since, which is asked about next
            return
        if serial < noticed and self._rechecks < _RECHECKS:
            self._rechecks += 1
            self._retry.failed()
            return
        self._rechecks = 0
        self._noticed = self._settled = serial
        self._retry.progressed()

    async def _take(self, offer: pb.OfferReleaseResponse) -> _Outcome:
        """Take an offer as far as that is possible now. Raises ReleaseRefused."""
        if not offer.manifest:
            return await self._use_none()
        folder, options = self._loader.folder, self._options
        manifest = check(offer.manifest, options.keys, self._target, folder.state)
        release = InstalledRelease(
            digest=manifest.digest,
            version=manifest.version,
            canary=offer.canary,
            manifest=manifest_digest(offer.manifest),
            key_id=signing_key_id(offer.manifest),
        )
        if self._in_use == release.digest:
            await self._loader.change(folder.state.take(release))  # it may be offered as a canary no longer
            return "settled"
        if not await asyncio.to_thread(folder.files.verify, release.digest):
            urls = download_urls(manifest.urls, offer.base_url, release.digest)
            fetched = await self._fetch(ReleaseFile(release.digest, manifest.size, urls))
            return "recheck" if fetched else "news"
        if not await self._drafts.retired(_RETIRE_S):
            return "retry"  # no third model is loaded
        await self._use(await self._loader.take(release))
        log.info("drafting with release %s (version %d) from now on", release.digest[:12], release.version)
        return "settled"

    async def _use_none(self) -> _Outcome:
        """Use no release, since none is offered; but never go back to before a stable release."""
        state = self._loader.state
        if state.current is not None and state.floor == 0:
            return await self._go_back(state.left())
        if state.current is not None and state.current.version > state.floor and state.last_good is not None:
            return await self._go_back(state.dropped())
        return "settled"

    async def _on_refused(self, offer: pb.OfferReleaseResponse, error: ReleaseRefused) -> _Outcome:
        manifest = manifest_digest(offer.manifest)
        self._refusals.note(error.kind, manifest, str(error))
        if error.kind in ("altered", "too long"):
            self._altered[manifest] += 1
        if error.kind in TRANSIENT and self._altered[manifest] < _MAX_ALTERED:
            return "retry"
        state = self._loader.state
        if state.current is not None and state.current.canary and state.current.manifest != manifest:
            return await self._go_back(state.dropped())  # another release is offered, so the canary is over
        return "settled"

    async def _go_back(self, state: ReleaseState) -> _Outcome:
        """Use the current release of another state, whose file is here, or none."""
        if not await self._drafts.retired(_RETIRE_S):
            return "retry"
        await self._loader.change(state)
        pool = await self._loader.load_current()
        await self._use(pool if pool is not None else self._fallback())
        return "settled"

    @property
    def _in_use(self) -> str:
        """Return the release that new sessions draft with; empty for none."""
        return self._drafts.pool.release if self._drafts.pool is not None else ""

    async def _use(self, pool: DraftPool | None) -> None:
        self._drafts.replace(pool)
        await asyncio.to_thread(self._loader.folder.tidy)

    async def _fetch(self, file: ReleaseFile) -> bool:
        """Fetch a file; return False where news come first, and then what has come of the file is kept."""
        folder = self._loader.folder
        await asyncio.to_thread(folder.tidy, file.digest)
        fetching = asyncio.create_task(self._downloader.fetch(file))
        news = asyncio.create_task(self._news.wait())
        try:
            await asyncio.wait({fetching, news}, return_when=asyncio.FIRST_COMPLETED)
            if fetching.done():
                await fetching
            return fetching.done()
        except OSError as error:
            raise ReleaseRefused(
                "no room",
                f"release {file.digest[:12]} of {file.size} bytes cannot be kept in {folder.path}: {error}; "
                "free space there, or give another folder with --cache-dir or OUTRIDER_EDGE_CACHE_DIR",
            ) from error
        finally:
            for task in (fetching, news):
                task.cancel()
            await asyncio.wait({fetching, news})
