"""Follows what the coordinator offers: asks when there is news, takes what will do."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from edge_agent.releases.check import PASSING, ReleasePolicy, ReleaseRefused, check, key_of, name_of
from edge_agent.releases.download import Downloader, Wanted, absolute
from edge_agent.releases.loader import RefusalLog, ReleaseLoader
from edge_agent.releases.state import InstalledRelease
from edge_agent.releases.trials import ReleaseTrials, retry_backoff
from edge_agent.session.coordinator_client import ReleaseOffer
from outrider.core.errors import OutriderError
from outrider.wire.ticket import Target

log = logging.getLogger(__name__)

_LESS_S = 5.0
"""Before the coordinator is asked about a serial below the one known: a verifier that lags behind tells such, too."""
_DOUBTS = 2
"""Times that the coordinator is asked again where it knows of less than was heard: another one may be ahead of it."""
_ALTERED = 2
"""Times that a whole file is fetched in vain before the next news is waited for."""


@dataclass(frozen=True)
class UpdateOptions:
    """How this device takes releases."""

    terms: ReleasePolicy
    root: Path
    """Folder of all targets' releases."""
    stall_s: float = 20.0
    spread_s: float = 2.0
    """Devices that hear of a release at once ask for it at a random moment within this time."""
    ca: Path | None = None
    """PEM file of the cluster's own authorities: what the coordinator serves, it serves with its own certificate."""


Ask = Callable[[str, str, str], Awaitable[ReleaseOffer]]
"""(weights hash of the target, device id, release in use) -> what the coordinator offers. Raises core errors."""


class _Step(enum.Enum):
    """What has become of an offer."""

    DONE = "it is in use, or will never be"
    LATER = "it may do at another time"
    AGAIN = "its file has come; whether it is offered still is asked before it is used"
    NEWS = "there is a newer one"


class OfferFollower:
    """Asks what is offered whenever there is news, and does it; `trials` judges it meanwhile."""

    def __init__(
        self,
        plan: UpdateOptions,
        ask: Ask,
        target: Target,
        shelf: ReleaseLoader,
        refusals: RefusalLog,
        trials: ReleaseTrials,
    ) -> None:
        self._plan = plan
        self._ask = ask
        self._target = target
        self._shelf = shelf
        self._refusals = refusals
        self.trials = trials
        self._downloader = Downloader(shelf.store.files, plan.stall_s, ca=plan.ca)
        self._wake = asyncio.Event()
        self._news = asyncio.Event()
        """Something was heard since the coordinator was asked last."""
        self._heard, self._settled = 0, -1
        """Serials: of the latest news, and of what was done last. Where they differ the coordinator is to be asked."""
        self._not_before = 0.0
        self._doubts = 0
        self._retry = retry_backoff()
        self._altered: Counter[str] = Counter()
        """By the names of manifests."""

    def notice(self, serial: int) -> None:
        """Somebody has heard of this state of releases. It is only a reason to ask: the coordinator's word counts."""
        if serial > self._heard:
            self._heard, self._not_before = serial, 0.0
            self._retry.retry_now()
            self._news.set()
        elif serial < self._heard == self._settled:
            self._heard, self._not_before = serial, time.monotonic() + _LESS_S
        self._wake.set()

    async def run(self) -> None:
        judging = asyncio.create_task(self.trials.run())
        try:
            await self._follow()
        finally:
            judging.cancel()
            await asyncio.wait({judging})

    async def _follow(self) -> None:
        while True:
            try:
                if self._heard != self._settled and not self._wait_s:
                    await self._update()
            except Exception as error:
                log.exception("draft releases are left alone for a while: %s", error)
                self._retry.failed()
            await self._pause()

    @property
    def _wait_s(self) -> float:
        return max(self._retry.due_in_s, self._not_before - time.monotonic(), 0.0)

    async def _pause(self) -> None:
        """Until there is something to ask."""
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.01, self._wait_s) if self._heard != self._settled else None):
                await self._wake.wait()

    # --- what is offered

    async def _update(self) -> None:
        if self._settled >= 0:
            await asyncio.sleep(random.uniform(0.0, self._plan.spread_s))
        heard, step = self._heard, _Step.AGAIN
        while step is _Step.AGAIN:
            heard = self._heard
            self._news.clear()
            try:
                offer = await self._ask(self._target.weights_hash, self._shelf.state.device_id, self.trials.in_use)
            except OutriderError as error:
                log.info("the coordinator could not say which draft to use: %s", error)
                step = _Step.LATER
                break
            try:
                step = await self._do(offer)
            except ReleaseRefused as error:
                step = await self._refused(offer, error)
        if step is _Step.LATER:
            self._retry.failed()
        elif step is _Step.DONE:
            self._settle(offer.serial, heard)

    def _settle(self, serial: int, heard: int) -> None:
        """The offer of this serial is dealt with. heard: what was, before it was asked for."""
        if self._heard != heard:
            self._settled = serial  # there is news since: it is asked about next
            return
        if serial < heard and self._doubts < _DOUBTS:
            self._doubts += 1
            self._retry.failed()
            return
        self._doubts = 0
        self._heard = self._settled = serial
        self._retry.progressed()

    async def _do(self, offer: ReleaseOffer) -> _Step:
        """Raises ReleaseRefused where what is offered would not do."""
        if not offer.manifest:
            await self.trials.keep_to_own()
            return _Step.DONE
        manifest = check(offer.manifest, self._plan.terms, self._target, self._shelf.state.at(time.time()))
        slot = InstalledRelease(
            digest=manifest.digest,
            version=manifest.version,
            canary=offer.canary,
            manifest=name_of(offer.manifest),
            key_id=key_of(offer.manifest),
        )
        if await self.trials.has(slot):
            return _Step.DONE
        self.trials.wanted = slot.digest
        if not await asyncio.to_thread(self._shelf.store.files.verify, slot.digest):
            wanted = Wanted(slot.digest, manifest.size, absolute(manifest.urls, offer.base_url, slot.digest))
            return _Step.AGAIN if await self._fetched(wanted) else _Step.NEWS
        if not await self.trials.take(slot):
            return _Step.LATER
        log.info("drafting with release %s (version %d) from now on", slot.digest[:12], slot.version)
        return _Step.DONE

    async def _refused(self, offer: ReleaseOffer, error: ReleaseRefused) -> _Step:
        name = name_of(offer.manifest)
        self._refusals.note(error.kind, name, str(error))
        if error.kind in ("altered", "too long"):
            self._altered[name] += 1
        if error.kind in PASSING and self._altered[name] < _ALTERED:
            return _Step.LATER
        self.trials.wanted = ""
        await self.trials.withdraw(name)
        return _Step.DONE

    async def _fetched(self, wanted: Wanted) -> bool:
        """False where there is news before the file is here: what has come of it is kept."""
        store = self._shelf.store
        await asyncio.to_thread(store.tidy, wanted.digest)
        fetching = asyncio.create_task(self._downloader.fetch(wanted))
        news = asyncio.create_task(self._news.wait())
        try:
            await asyncio.wait({fetching, news}, return_when=asyncio.FIRST_COMPLETED)
            if fetching.done():
                await fetching
            return fetching.done()
        except OSError as error:
            raise ReleaseRefused(
                "no room",
                f"release {wanted.digest[:12]} of {wanted.size} bytes cannot be kept in {store.folder}: {error}; "
                "mend that, or give another folder with --cache-dir or OUTRIDER_EDGE_CACHE_DIR",
            ) from error
        finally:
            for task in (fetching, news):
                task.cancel()
            await asyncio.wait({fetching, news})
