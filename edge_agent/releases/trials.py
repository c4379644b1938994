"""What sessions draft with: judged while it is on trial, left for the last good draft where it does not do."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable

from edge_agent.drafting.health import HitRate, TrialVerdict, judge
from edge_agent.drafting.manager import DraftManager
from edge_agent.drafting.pool import DraftPool
from edge_agent.releases.check import Kind, ReleaseRefused
from edge_agent.releases.loader import ReleaseLoader
from edge_agent.releases.state import InstalledRelease, ReleaseState
from outrider.core.backoff import Backoff
from outrider.core.errors import OutriderError

log = logging.getLogger(__name__)

LOOK_S = 0.25
"""How often a trial is looked at."""
TRIAL_S = 3600.0
"""A release that has not failed for so long has passed: some texts bring no guesses to judge it by."""
_SINGLE_S = 10.0
"""How long a third model waits for sessions to leave the first one, before it is put off."""
RETRY_FIRST_S, RETRY_MAX_S = 5.0, 600.0
"""The pauses after what failed, at first and at most."""

Own = Callable[[], Awaitable[DraftPool | None]]
"""The draft that the verifiers offer themselves. Raises core errors where it cannot be had at the moment."""


def retry_backoff() -> Backoff:
    """Return the pauses of whatever is tried again for a release."""
    return Backoff(first_s=RETRY_FIRST_S, max_s=RETRY_MAX_S)


class ReleaseTrials:
    """Keeps the room to what the slots say: a task of its own, since a failing draft is left whatever is under way."""

    def __init__(self, shelf: ReleaseLoader, room: DraftManager, own: Own) -> None:
        self._shelf = shelf
        self._room = room
        self._own = own
        self._changing = asyncio.Lock()
        """Held while the slots and the room change."""
        self._wake = asyncio.Event()
        self._retry = retry_backoff()
        current = shelf.state.current
        self._astray = current is not None and (room.pool is None or room.pool.release != current.digest)
        """The slots say another draft than the room has: it is to be loaded."""
        self._own_release = room.pool.release if room.pool is not None and current is None else ""
        """Of the verifier's own draft, where it was in use."""
        self.wanted = ""
        """Release whose file is kept although no slot holds it."""
        self.swaps = 0

    @property
    def in_use(self) -> str:
        """The release that new sessions draft with; empty for none."""
        return self._room.pool.release if self._room.pool is not None else ""

    @property
    def score(self) -> HitRate | None:
        """Of the current release; None where another draft is in use."""
        pool, slot = self._room.pool, self._shelf.state.current
        return pool.health.hit_rate if pool is not None and slot is not None and pool.release == slot.digest else None

    async def run(self) -> None:
        while True:
            try:
                async with self._changing:
                    if not self._retry.due_in_s:
                        await (self._reload() if self._astray else self._judge())
            except Exception as error:
                log.exception("the draft in use is not judged for a while: %s", error)
                self._retry.failed()
            await self._pause()

    async def _pause(self) -> None:
        """Until there is something to look at."""
        self._wake.clear()
        waits = LOOK_S if self._astray or self._shelf.state.trial is not None else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(waits):
                await self._wake.wait()

    async def _judge(self) -> None:
        """What the release on trial has shown so far."""
        slot, trial, now = self._shelf.state.current, self._shelf.state.trial, self.score
        if slot is None or trial is None or now is None or self._room.pool is None:
            return
        before = trial.before.score
        if failure := self._room.pool.health.failure:
            await self._give_up("failed", f"it failed while drafting: {failure}")
            return
        verdict = judge(before, now)
        if verdict is TrialVerdict.WORSE:
            shares = f"{now.share:.0%} of {now.guessed} first guesses right, {before.share:.0%} before"
            await self._give_up("worse", f"it guesses clearly worse on this device: {shares}")
        elif verdict is TrialVerdict.HEALTHY or trial.lasted_s(time.time()) > TRIAL_S:
            await self._shelf.change(self._shelf.state.proven())
            log.info("release %s (version %d) is healthy on this device", slot.digest[:12], slot.version)

    async def _give_up(self, kind: Kind, reason: str) -> None:
        """Back to the last good draft."""
        await self._shelf.give_up(kind, reason)
        await self._reload()

    # --- what is offered

    async def has(self, slot: InstalledRelease) -> bool:
        """Whether it is in use already; if so, what is offered of it now is noted."""
        async with self._changing:
            if self.in_use != slot.digest or self._astray:
                return False
            if self.score is not None:
                await self._shelf.change(self._shelf.state.take(slot, HitRate()))  # it may have become everybody's
            return True

    async def take(self, slot: InstalledRelease) -> bool:
        """Draft with a release whose file is here. Raises ReleaseRefused; False where another model must go first."""
        async with self._changing:
            if not await self._room.retired(_SINGLE_S):
                return False
            pool = self._room.pool
            before = pool.health.hit_rate if pool is not None and pool.has_model else HitRate()
            try:
                taken = await self._shelf.take(slot, before)
            except ReleaseRefused:
                good = self._shelf.state.current  # which it was not where another one was on trial
                if good is not None and good.digest != self.in_use:
                    self._stray()
                raise
            self.wanted = ""
            await self._swap(taken)
            return True

    async def keep_to_own(self) -> None:
        """Nothing is offered: the verifier's own draft, unless that were a step back behind a stable release."""
        async with self._changing:
            state = self._shelf.state
            if state.current is None:
                return
            if state.floor == 0:
                await self._leave_for(state.left())
            elif state.current.version > state.floor and state.last_good is not None:
                await self._leave_for(state.dropped())

    async def withdraw(self, offered: str) -> None:
        """What is offered does not do here. A canary that it came instead of is over all the same.

        offered: name of its manifest.
        """
        async with self._changing:
            state = self._shelf.state
            if state.current is not None and state.current.canary and state.current.manifest != offered:
                await self._leave_for(state.dropped())

    # --- swapping

    async def _leave_for(self, state: ReleaseState) -> None:
        await self._shelf.change(state)
        await self._reload()

    def _stray(self) -> None:
        self._astray = True
        self._wake.set()

    async def _reload(self) -> None:
        """Swap in what the slots say now. What is in use stays until that is here, and it is tried again."""
        self._stray()
        slot = self._shelf.state.current
        release = slot.digest if slot is not None else self._own_release
        if release and self._room.recall(release):
            self._arrived()
            return
        if not await self._room.retired(_SINGLE_S):
            self._retry.failed()
            return
        pool = await self._shelf.current()
        if pool is None:
            try:
                pool = await self._own()
            except OutriderError as error:
                log.warning("the verifier's own draft cannot be had, it is asked for again later: %s", error)
                self._retry.failed()
                return
            self._own_release = pool.release if pool is not None else ""
        await self._swap(pool)

    async def _swap(self, pool: DraftPool | None) -> None:
        self._room.replace(pool)
        self._arrived()
        await asyncio.to_thread(self._shelf.store.tidy, self.wanted)

    def _arrived(self) -> None:
        self.swaps += 1
        self._astray = False
        self._retry.progressed()
        self._wake.set()
