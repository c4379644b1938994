"""Keeps a client's draft to what its coordinator offers and its publishers have signed, while sessions go on.

A release is checked by its manifest, fetched, hashed, loaded, compared with the target's token table, swapped in and
tried out; whatever it fails at leaves the sessions with the draft that they have.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from edge_agent.drafting.manager import DraftManager
from edge_agent.drafting.pool import DraftPool
from edge_agent.releases.check import Kind
from edge_agent.releases.follower import Ask, OfferFollower, UpdateOptions
from edge_agent.releases.loader import Load, RefusalLog, ReleaseLoader
from edge_agent.releases.store import SlotStore
from edge_agent.releases.trials import Own, ReleaseTrials
from outrider.wire.ticket import Target

log = logging.getLogger(__name__)

_TAKE_OVER_S = 30.0
"""How often a client looks whether the process that keeps the folder has ended."""


class ReleaseUpdater:
    """One client's. `begin` gives the draft to start with, `run` keeps it up to date until `close`."""

    def __init__(self, plan: UpdateOptions, ask: Ask) -> None:
        self._plan = plan
        self._ask = ask
        self._shelf: ReleaseLoader | None = None
        self._load: Load | None = None
        self._target = Target("", "", "")
        self._refusals = RefusalLog()
        self._follower: OfferFollower | None = None
        self._task: asyncio.Task[None] | None = None
        self._noticed = 0

    @property
    def refused(self) -> Counter[Kind]:
        """Releases that were offered and not taken, or given up, by what for; each once."""
        return self._refusals.by_kind

    @property
    def swaps(self) -> int:
        """Times that the draft was replaced."""
        return self._follower.trials.swaps if self._follower is not None else 0

    @property
    def on_trial(self) -> bool:
        return self._shelf is not None and self._shelf.state.trial is not None

    @property
    def floor(self) -> int:
        """Version below which nothing is taken."""
        return self._shelf.state.floor if self._shelf is not None else 0

    def notice(self, serial: int) -> None:
        """The cluster says that there are other releases than before."""
        self._noticed = serial
        if self._follower is not None:
            self._follower.notice(serial)

    async def begin(self, target: Target, load: Load) -> DraftPool | None:
        """The release that this device has found good, or has on trial; None for the verifier's own draft."""
        await self._let_go()
        self._target, self._load = target, load
        try:
            self._shelf = await self._opened(load)
            if not self._shelf.store.ours:
                log.info("another process keeps %s: this one uses what that found good", self._shelf.store.folder)
            return await self._shelf.first()
        except (OSError, ImportError) as error:
            log.warning("no draft releases, with their folder %s: %s", self._plan.root, error)
            await self._let_go()
            return None

    def run(self, room: DraftManager, own: Own) -> None:
        """Follow what is offered, in the background."""
        if self._shelf is not None and self._load is not None:
            self._task = asyncio.create_task(self._follow(self._shelf, self._load, room, own))

    async def _follow(self, shelf: ReleaseLoader, load: Load, room: DraftManager, own: Own) -> None:
        """Another process may keep the folder: its work is gone on with when it ends."""
        while not shelf.store.ours:
            await asyncio.sleep(_TAKE_OVER_S)
            try:
                shelf = await self._opened(load)
                if shelf.store.ours:
                    log.info("this process keeps %s from now on", shelf.store.folder)
                    self._shelf = shelf
                    await shelf.recover()
            except OSError as error:
                log.info("the folder of draft releases cannot be used: %s", error)
        trials = ReleaseTrials(shelf, room, own)
        self._follower = OfferFollower(self._plan, self._ask, self._target, shelf, self._refusals, trials)
        self._follower.notice(self._noticed)
        await self._follower.run()

    async def _opened(self, load: Load) -> ReleaseLoader:
        """Raises OSError."""
        store = await asyncio.to_thread(SlotStore.open, self._plan.root, self._target.weights_hash)
        return ReleaseLoader(store, load, self._refusals, self._plan.terms.keys)

    async def close(self) -> None:
        """In order: a trial goes on with the next start. Before the room is closed."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None
        await self._let_go()

    async def _let_go(self) -> None:
        """Write down that nothing is under way any more, and leave the folder to others."""
        shelf, self._shelf = self._shelf, None
        if shelf is not None and shelf.store.ours:
            score = self._follower.trials.score if self._follower is not None else None
            await shelf.change(shelf.state.paused(score))
            shelf.store.close()
