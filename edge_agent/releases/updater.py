"""Keeps a client's draft to what its coordinator offers and its publishers have signed, while sessions go on.

A release is checked by its manifest, fetched, hashed, loaded, compared with the target's token table, swapped in and
tried out; whatever it fails at leaves the sessions with the draft that they have.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from edge_agent.draft_room import DraftRoom
from edge_agent.drafts import DraftPool
from edge_agent.health import Score, Verdict, judge
from edge_agent.placement import Offer
from edge_agent.releases.check import PASSING, Kind, ReleaseRefused, Terms, check, name_of
from edge_agent.releases.download import Downloader, Wanted, absolute
from edge_agent.releases.shelf import Load, Refusals, Shelf
from edge_agent.releases.slots import Slot
from edge_agent.releases.store import SlotStore
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


class Updater:
    """One client's. `begin` gives the draft to start with, `run` keeps it up to date until `close`."""

    def __init__(self, plan: UpdatePlan, ask: Ask) -> None:
        self._plan = plan
        self._ask = ask
        self._shelf: Shelf | None = None
        self._target = Target("", "", "")
        self._refusals = Refusals()
        self._follower: _Follower | None = None
        self._task: asyncio.Task[None] | None = None
        self._noticed = 0

    @property
    def refused(self) -> Counter[Kind]:
        """Releases that were offered and not taken, or given up, by what for; each once."""
        return self._refusals.by_kind

    @property
    def swaps(self) -> int:
        """Times that the draft was replaced."""
        return self._follower.swaps if self._follower is not None else 0

    @property
    def on_trial(self) -> bool:
        return self._shelf is not None and self._shelf.state.trial is not None

    @property
    def floor(self) -> int:
        """Version below which nothing is taken."""
        return self._shelf.state.floor if self._shelf is not None else 0

    def notice(self, serial: int) -> None:
        """The cluster says that there are other releases than before."""
        self._noticed = max(self._noticed, serial)
        if self._follower is not None:
            self._follower.notice(serial)

    async def begin(self, target: Target, load: Load) -> DraftPool | None:
        """The release that this device has found good, or has on trial; None for the verifier's own draft."""
        try:
            store = await asyncio.to_thread(SlotStore.open, self._plan.root, target.weights_hash)
            self._shelf = Shelf(store, load, self._refusals)
            self._target = target
            if not store.ours:
                log.info("another process keeps %s: this one uses what that found good", store.folder)
            return await self._shelf.first()
        except OSError as error:
            log.warning("no draft releases: the folder %s cannot be used: %s", self._plan.root, error)
            return None

    def run(self, room: DraftRoom, own: Own) -> None:
        """Follow what is offered, in the background."""
        if self._shelf is not None and self._shelf.store.ours:
            self._follower = _Follower(self._plan, self._ask, self._target, self._shelf, self._refusals, room, own)
            self._follower.notice(self._noticed)
            self._task = asyncio.create_task(self._follower.run())

    async def close(self) -> None:
        """In order: a trial goes on with the next start. Before the room is closed."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None
        if self._shelf is not None and self._shelf.store.ours:
            with contextlib.suppress(OSError):
                state = self._shelf.state
                score = self._follower.score if self._follower is not None else None
                await self._shelf.change(state.paused(score))
            self._shelf.store.close()


class _Follower:
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
            self._heard = serial
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
