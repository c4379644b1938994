"""Keep a client's draft up to date with what its coordinator offers and its publishers have signed.

A release is checked by its manifest, fetched, hashed, loaded, compared with the target's token table, and swapped in
while sessions run. Where any of this fails, the sessions keep the draft that they have.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from edge_agent.drafting.manager import DraftManager
from edge_agent.drafting.pool import DraftPool
from edge_agent.releases.check import RefusalKind
from edge_agent.releases.folder import ReleaseFolder
from edge_agent.releases.follower import Ask, Fallback, OfferFollower, UpdateOptions
from edge_agent.releases.loader import LoadPool, RefusalLog, ReleaseLoader
from outrider.wire.ticket import Target

log = logging.getLogger(__name__)

_TAKE_OVER_S = 30.0
"""Interval at which a client checks whether the process that keeps the folder has ended."""


class ReleaseUpdater:
    """The releases of one client. `begin` loads the draft to start with, `run` keeps it up to date until `close`."""

    def __init__(self, options: UpdateOptions, ask: Ask) -> None:
        """Follow what `ask` returns."""
        self._options = options
        self._ask = ask
        self._loader: ReleaseLoader | None = None
        self._load: LoadPool | None = None
        self._target = Target("", "", "")
        self._refusals = RefusalLog()
        self._follower: OfferFollower | None = None
        self._task: asyncio.Task[None] | None = None
        self._serial = 0
        """Serial of the latest notice."""

    @property
    def refused(self) -> Counter[RefusalKind]:
        """Return the releases that were offered and not taken, or given up; each counts once by reason."""
        return self._refusals.by_kind

    @property
    def device_id(self) -> str:
        """Return the id by which releases are offered to this device; empty before `begin` and without a folder."""
        return self._loader.state.device_id if self._loader is not None else ""

    def notice(self, serial: int) -> None:
        """Note that the cluster's releases have changed; `serial` grows with every change."""
        self._serial = serial
        if self._follower is not None:
            self._follower.notice(serial)

    async def begin(self, target: Target, load: LoadPool) -> DraftPool | None:
        """Load the release that this device has loaded before; None where there is none."""
        await self._close_folder()
        self._target, self._load = target, load
        try:
            self._loader = await self._open_folder(load)
            if not self._loader.folder.writable:
                log.info("another process maintains %s: this one uses the same draft", self._loader.folder.path)
            return await self._loader.load_first()
        except (OSError, ImportError) as error:
            log.warning("no releases are used, since their folder %s cannot be: %s", self._options.root, error)
            await self._close_folder()
            return None

    def run(self, drafts: DraftManager, fallback: Fallback) -> None:
        """Follow what is offered, in the background."""
        if self._loader is not None and self._load is not None:
            self._task = asyncio.create_task(self._follow(self._loader, self._load, drafts, fallback))

    async def close(self) -> None:
        """End in order, before the client's drafts are closed."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None
        await self._close_folder()

    async def _follow(self, loader: ReleaseLoader, load: LoadPool, drafts: DraftManager, fallback: Fallback) -> None:
        """Follow what is offered, once no other process keeps the folder."""
        while not loader.folder.writable:
            await asyncio.sleep(_TAKE_OVER_S)
            try:
                loader = await self._open_folder(load)
                if loader.folder.writable:
                    log.info("this process maintains %s from now on", loader.folder.path)
                    self._loader = loader
                    await loader.recover()
            except OSError as error:
                log.info("the folder of draft releases cannot be used: %s", error)
        follower = OfferFollower(self._options, self._ask, self._target, loader, self._refusals, drafts, fallback)
        self._follower = follower
        follower.notice(self._serial)
        await follower.run()

    async def _open_folder(self, load: LoadPool) -> ReleaseLoader:
        """Open the target's folder. Raises OSError where it cannot be used."""
        folder = await asyncio.to_thread(ReleaseFolder.open, self._options.root, self._target.weights_hash)
        return ReleaseLoader(folder, load, self._refusals, self._options.keys)

    async def _close_folder(self) -> None:
        """Note that nothing is being loaded any more, and leave the folder to other processes."""
        loader, self._loader = self._loader, None
        if loader is not None and loader.folder.writable:
            await loader.change(loader.state.ended())
            loader.folder.close()
