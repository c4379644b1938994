"""Keep sessions on the current release, judge it while it is on trial, and go back where it fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable

from edge_agent.drafting.health import FirstAcceptance, judge
from edge_agent.drafting.manager import DraftManager
from edge_agent.drafting.pool import DraftPool
from edge_agent.releases.check import RefusalKind, ReleaseRefused
from edge_agent.releases.loader import ReleaseLoader
from edge_agent.releases.state import InstalledRelease, ReleaseState
from outrider.core.backoff import Backoff

log = logging.getLogger(__name__)

LOOK_S = 0.25
"""Interval at which a trial is judged."""
TRIAL_S = 3600.0
"""A release that has not failed for so long has passed: some texts bring too few proposals to judge it by."""
_RETIRE_S = 10.0
"""Time that a third draft waits for sessions to leave the first one, before it is put off."""
RETRY_FIRST_S, RETRY_MAX_S = 5.0, 600.0
"""The pauses after what failed, at first and at most."""

Fallback = Callable[[], DraftPool | None]
"""Returns what is used without a release: n-grams, or None for nothing."""


def retry_backoff() -> Backoff:
    """Return the pauses of whatever is tried again for a release."""
    return Backoff(first_s=RETRY_FIRST_S, max_s=RETRY_MAX_S)


class ReleaseTrials:
    """Makes the client's drafts follow the state of its releases.

    `run` is a task of its own, since a draft that fails is left whatever else is under way.
    """

    def __init__(self, loader: ReleaseLoader, drafts: DraftManager, fallback: Fallback) -> None:
        self._loader = loader
        self._drafts = drafts
        self._fallback = fallback
        self._changing = asyncio.Lock()
        """Held while the state or the draft changes."""
        self._wake = asyncio.Event()
        self._retry = retry_backoff()
        pool, current = drafts.pool, loader.state.current
        self._outdated = current is not None and (pool is None or pool.release != current.digest)
        """Whether the state names another draft than the one in use: it is to be loaded."""
        self.wanted = ""
        """Release whose file is kept although the state does not name it."""
        self.swaps = 0
        """The number of times that the draft was replaced."""

    @property
    def in_use(self) -> str:
        """Return the release that new sessions draft with; empty for none."""
        return self._drafts.pool.release if self._drafts.pool is not None else ""

    @property
    def first_acceptance(self) -> FirstAcceptance | None:
        """Return what became of the current release's first proposals; None where another draft is in use."""
        pool, release = self._drafts.pool, self._loader.state.current
        in_use = pool is not None and release is not None and pool.release == release.digest
        return pool.health.first_acceptance if pool is not None and in_use else None

    async def run(self) -> None:
        """Judge the current release, and load another one where the state names it, until cancelled."""
        while True:
            try:
                async with self._changing:
                    if not self._retry.due_in_s:
                        await (self._reload() if self._outdated else self._judge())
            except Exception as error:
                log.exception("the draft in use is not judged for a while: %s", error)
                self._retry.failed()
            await self._pause()

    async def _pause(self) -> None:
        """Wait until there is something to judge or to load."""
        self._wake.clear()
        waits = LOOK_S if self._outdated or self._loader.state.trial is not None else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(waits):
                await self._wake.wait()

    async def _judge(self) -> None:
        """Give up a release on trial that has failed or proposes worse, and pass one that has proved itself."""
        state, pool, now = self._loader.state, self._drafts.pool, self.first_acceptance
        release, trial = state.current, state.trial
        if release is None or trial is None or now is None or pool is None:
            return
        if failure := pool.health.failure:
            await self._give_up("failed", f"it failed while drafting: {failure}")
            return
        verdict = judge(trial.before, now)
        if verdict == "worse":
            shares = f"{now.share:.0%} of {now.proposed} first proposals accepted, {trial.before.share:.0%} before"
            await self._give_up("worse", f"its proposals are clearly worse on this device: {shares}")
        elif verdict == "healthy" or trial.lasted_s(time.time()) > TRIAL_S:
            await self._loader.change(state.proven())
            log.info("release %s (version %d) is healthy on this device", release.digest[:12], release.version)

    async def _give_up(self, kind: RefusalKind, reason: str) -> None:
        await self._loader.give_up(kind, reason)
        await self._reload()

    # --- what is offered

    async def has(self, release: InstalledRelease) -> bool:
        """Return whether a release is in use; if so, note whether it is offered as a canary."""
        async with self._changing:
            if self.in_use != release.digest or self._outdated:
                return False
            if self.first_acceptance is not None:
                await self._loader.change(self._loader.state.take(release, FirstAcceptance()))
            return True

    async def take(self, release: InstalledRelease) -> bool:
        """Draft with a release whose file is here. Raises ReleaseRefused.

        Returns False where sessions still use the draft before the present one: no third model is loaded.
        """
        async with self._changing:
            if not await self._drafts.retired(_RETIRE_S):
                return False
            pool = self._drafts.pool
            before = pool.health.first_acceptance if pool is not None and pool.has_model else FirstAcceptance()
            try:
                taken = await self._loader.take(release, before)
            except ReleaseRefused:
                good = self._loader.state.current  # another one than before where a release was on trial
                if good is not None and good.digest != self.in_use:
                    self._outdate()
                raise
            self.wanted = ""
            await self._replace(taken)
            return True

    async def use_none(self) -> None:
        """Use none, since no release is offered; but never go back to before a stable release."""
        async with self._changing:
            state = self._loader.state
            if state.current is None:
                return
            if state.floor == 0:
                await self._change_to(state.left())
            elif state.current.version > state.floor and state.last_good is not None:
                await self._change_to(state.dropped())

    async def withdraw(self, offered: str) -> None:
        """Leave a canary, where a release is offered that was refused: the canary is over all the same.

        offered: digest of that release's manifest.
        """
        async with self._changing:
            state = self._loader.state
            if state.current is not None and state.current.canary and state.current.manifest != offered:
                await self._change_to(state.dropped())

    # --- replacing the draft

    async def _change_to(self, state: ReleaseState) -> None:
        await self._loader.change(state)
        await self._reload()

    def _outdate(self) -> None:
        self._outdated = True
        self._wake.set()

    async def _reload(self) -> None:
        """Use the draft that the state names. The present one stays until that is loaded, which may take more tries."""
        self._outdate()
        current = self._loader.state.current
        if current is not None and self._drafts.recall(current.digest):
            self._replaced()
            return
        if not await self._drafts.retired(_RETIRE_S):
            self._retry.failed()
            return
        pool = await self._loader.load_current()
        await self._replace(pool if pool is not None else self._fallback())

    async def _replace(self, pool: DraftPool | None) -> None:
        self._drafts.replace(pool)
        self._replaced()
        await asyncio.to_thread(self._loader.folder.tidy, self.wanted)

    def _replaced(self) -> None:
        self.swaps += 1
        self._outdated = False
        self._retry.progressed()
        self._wake.set()
