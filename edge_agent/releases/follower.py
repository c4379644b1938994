"""Follows what the coordinator offers: asks when there is news, takes what will do, judges what is on trial."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from edge_agent.draft_room import DraftRoom
from edge_agent.drafts import DraftPool
from edge_agent.health import Score, Verdict, judge
from edge_agent.placement import Offer
from edge_agent.releases.check import PASSING, Kind, ReleaseRefused, Terms, check, name_of
from edge_agent.releases.download import Downloader, Wanted, absolute
from edge_agent.releases.shelf import Refusals, Shelf
from edge_agent.releases.slots import Slot
from outrider.core.errors import OutriderError
from outrider.wire.ticket import Target

log = logging.getLogger(__name__)

_LOOK_S = 0.25
"""How often a trial is looked at."""
_RETRY_S, _RETRY_MOST_S = 5.0, 600.0
"""Before the coordinator or a server of files is asked again; doubled each time."""
_SINGLE_S = 10.0
"""How long a third model waits for sessions to leave the first one, before it is put off."""


@dataclass(frozen=True)
class UpdatePlan:
    """How this device takes releases."""

    terms: Terms
    root: Path
    """Folder of all targets' releases."""
    stall_s: float = 20.0
    spread_s: float = 2.0
    """Devices that hear of a release at once ask for it at a random moment within this time."""


Ask = Callable[[str, str, str], Awaitable[Offer]]
"""(weights hash of the target, device id, release in use) -> what the coordinator offers. Raises core errors."""
Own = Callable[[], Awaitable[DraftPool | None]]
"""The draft that the verifiers offer themselves."""


class Follower:
    """Asks what is offered whenever there is news, does it, and judges what is on trial."""

    def __init__(
        self,
        plan: UpdatePlan,
        ask: Ask,
        target: Target,
        shelf: Shelf,
        refusals: Refusals,
        room: DraftRoom,
        own: Own,
    ) -> None:
        self._plan = plan
        self._ask = ask
        self._target = target
        self._shelf = shelf
        self._refusals = refusals
        self._room = room
        self._own = own
        self._wake = asyncio.Event()
        self._heard, self._answered = 0, -1
        """Serials: of the latest news, and of what was done last."""
        self._retry_s, self._retry_at = _RETRY_S, 0.0
        self._own_release = room.pool.release if room.pool is not None and shelf.state.current is None else ""
        """Of the verifier's own draft, where it was in use."""
        self.swaps = 0

    def notice(self, serial: int) -> None:
        if serial > self._heard:
            self._heard, self._retry_at = serial, 0.0
            self._wake.set()

    @property
    def score(self) -> Score | None:
        """Of the current release; None where another draft is in use."""
        pool, slot = self._room.pool, self._shelf.state.current
        return pool.health.score if pool is not None and slot is not None and pool.release == slot.digest else None

    async def run(self) -> None:
        while True:
            try:
                await self._judge()
                if self._heard > self._answered and time.monotonic() >= self._retry_at:
                    await self._update()
            except Exception as error:
                log.exception("draft releases are left alone for a while: %s", error)
                self._put_off()
            await self._pause()

    async def _pause(self) -> None:
        """Until there is something to look at."""
        waits = [self._retry_at - time.monotonic()] if self._heard > self._answered else []
        waits += [_LOOK_S] if self._shelf.state.trial is not None else []
        self._wake.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.01, min(waits)) if waits else None):
                await self._wake.wait()

    async def _judge(self) -> None:
        """What the release on trial has shown so far."""
        slot, trial, now = self._shelf.state.current, self._shelf.state.trial, self.score
        if slot is None or trial is None or now is None or self._room.pool is None:
            return
        before = trial.before.score
        if failure := self._room.pool.health.failure:
            await self._return("failed", f"it failed while drafting: {failure}")
            return
        verdict = judge(before, now)
        if verdict is Verdict.WORSE:
            shares = f"{now.share:.0%} of {now.guessed} first guesses right, {before.share:.0%} before"
            await self._return("worse", f"it guesses clearly worse on this device: {shares}")
        elif verdict is Verdict.HEALTHY:
            await self._shelf.change(self._shelf.state.proven())
            log.info("release %s (version %d) is healthy on this device", slot.digest[:12], slot.version)

    async def _return(self, kind: Kind, reason: str) -> None:
        """Back to the last good draft."""
        await self._shelf.give_up(kind, reason)
        await self._reload()

    # --- what is offered

    async def _update(self) -> None:
        if self._answered >= 0:
            await asyncio.sleep(random.uniform(0.0, self._plan.spread_s))
        heard = self._heard
        in_use = self._room.pool.release if self._room.pool is not None else ""
        try:
            offer = await self._ask(self._target.weights_hash, self._shelf.state.device_id, in_use)
        except OutriderError as error:
            log.info("the coordinator could not say which draft to use: %s", error)
            self._put_off()
            return
        try:
            if not await self._do(offer):
                self._put_off()
                return
        except ReleaseRefused as error:
            self._refusals.note(error.kind, name_of(offer.manifest), str(error))
            if error.kind in PASSING:
                self._put_off()
                return
        self._heard = max(self._heard, offer.serial)
        self._answered = max(heard, offer.serial)
        self._retry_s, self._retry_at = _RETRY_S, 0.0

    def _put_off(self) -> None:
        self._retry_at = time.monotonic() + self._retry_s * random.uniform(0.5, 1.0)
        self._retry_s = min(2 * self._retry_s, _RETRY_MOST_S)
        self._answered = min(self._answered, self._heard - 1)

    async def _do(self, offer: Offer) -> bool:
        """False where it has to be done later. Raises ReleaseRefused where what is offered would not do."""
        if not offer.manifest:
            await self._keep_to_own()
            return True
        manifest = check(offer.manifest, self._plan.terms, self._target, self._shelf.state)
        slot = Slot(
            digest=manifest.digest, version=manifest.version, canary=offer.canary, manifest=name_of(offer.manifest)
        )
        pool = self._room.pool
        if pool is not None and pool.release == slot.digest:
            if self.score is not None:
                await self._shelf.change(self._shelf.state.take(slot, Score()))  # it may have become everybody's
            return True
        await self._fetch(Wanted(slot.digest, manifest.size, absolute(manifest.urls, offer.base_url, slot.digest)))
        if not await self._room.single(_SINGLE_S):
            return False
        before = pool.health.score if pool is not None and pool.has_model else Score()
        await self._swap(await self._shelf.take(slot, before))
        log.info("drafting with release %s (version %d) from now on", slot.digest[:12], slot.version)
        return True

    async def _fetch(self, wanted: Wanted) -> None:
        store = self._shelf.store
        try:
            await asyncio.to_thread(store.tidy, wanted.digest)
            await Downloader(store.folder, self._plan.stall_s).fetch(wanted, store.file(wanted.digest))
        except OSError as error:
            raise ReleaseRefused(
                "no room",
                f"release {wanted.digest[:12]} of {wanted.size} bytes cannot be kept in {store.folder}: {error}; "
                "mend that, or give another folder with --cache-dir or OUTRIDER_EDGE_CACHE_DIR",
            ) from error

    async def _keep_to_own(self) -> None:
        """Nothing is offered: the verifier's own draft, unless that were a step back behind a stable release."""
        state = self._shelf.state
        if state.current is None:
            return
        if state.floor == 0:
            await self._shelf.change(state.left())
        elif state.current.version > state.floor and state.last_good is not None:
            await self._shelf.change(state.dropped())
        else:
            return
        await self._reload()

    # --- swapping

    async def _reload(self) -> None:
        """Swap in what the slots say now."""
        slot = self._shelf.state.current
        release = slot.digest if slot is not None else self._own_release
        if release and self._room.recall(release):
            self.swaps += 1
            return
        await self._room.single()
        pool = await self._shelf.current()
        if pool is None:
            try:
                pool = await self._own()
                self._own_release = pool.release if pool is not None else ""
            except OutriderError as error:
                log.warning("the verifier's own draft cannot be had, going on as plain cloud streaming: %s", error)
        await self._swap(pool)

    async def _swap(self, pool: DraftPool | None) -> None:
        self._room.replace(pool)
        self.swaps += 1
        await asyncio.to_thread(self._shelf.store.tidy)
