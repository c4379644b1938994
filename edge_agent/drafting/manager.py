"""Decide which draft a client's sessions use, and replace it while they run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from edge_agent.drafting.draft_session import DraftSession
from edge_agent.drafting.pool import DraftPool
from outrider.core.errors import ModelRefused, Overloaded
from outrider.core.protocol.device import DeviceSession

log = logging.getLogger(__name__)


class DraftManager:
    """Gives a client's sessions their draft, and replaces it.

    pool: the first draft; None without speculation. fallback: n-grams alone, for sessions that get no worker of a
    draft with a model, or whose draft fails; None for nothing.
    """

    def __init__(self, pool: DraftPool | None, fallback: DraftPool | None = None) -> None:
        self.pool = pool
        """The draft of new sessions."""
        self.fallback = fallback
        self._sessions: set[DraftSession] = set()
        self._changes: set[asyncio.Task[None]] = set()
        self._retired: dict[DraftPool, asyncio.Task[None]] = {}
        """Replaced drafts, each with the task that frees it when its last session has left it."""

    @contextlib.asynccontextmanager
    async def session(self, session: DeviceSession) -> AsyncIterator[DraftSession]:
        """Give a session a worker, of the fallback if all are in use or the draft cannot start, or else none.

        A session of one token gets none: its only step needs no proposal.
        """
        if session.max_tokens <= 1:
            yield DraftSession(session, None, None)
            return
        pool = self.pool
        draft = await self._begun(session, pool)
        self._sessions.add(draft)
        draft.on_failure = lambda: self._fall_back(draft)
        try:
            if pool is not self.pool:  # it was replaced while the worker started
                self._change(draft)
            yield draft
        finally:
            self._sessions.discard(draft)
            draft.end()

    def replace(self, pool: DraftPool | None) -> None:
        """Give new sessions this draft at once, and live ones when it has read their text; free the old one then."""
        old, self.pool = self.pool, pool
        for draft in sorted(self._sessions, key=self._by_turn):
            self._change(draft)
        if old is not None and old not in (pool, self.fallback):
            self._retired[old] = asyncio.create_task(self._free(old))

    async def retired(self, within_s: float | None = None) -> bool:
        """Wait until replaced drafts are freed, so that one model is in memory; return False if that takes longer."""
        if self._retired:
            await asyncio.wait(self._retired.values(), timeout=within_s)
        return not self._retired

    async def close(self) -> None:
        """Free all drafts. The sessions must have ended."""
        for task in [*self._changes, *self._retired.values()]:
            task.cancel()
        for pool in {*self._retired, self.pool, self.fallback}:
            if pool is not None:
                await pool.close()
        self._retired.clear()
        self.pool = self.fallback = None

    async def _begun(self, session: DeviceSession, pool: DraftPool | None) -> DraftSession:
        """Return a session's draft, and log if it is not the one that the session should have."""
        if pool is None:
            return DraftSession(session, None, None)
        try:
            return DraftSession(session, pool, await pool.take())
        except (ModelRefused, Overloaded) as error:
            draft = DraftSession(session, None, None)
            if self.fallback is not None and pool.has_model:
                with contextlib.suppress(ModelRefused, Overloaded):
                    draft = DraftSession(session, self.fallback, await self.fallback.take())
            draft.busy = isinstance(error, Overloaded)
            draft.failure = "" if draft.busy else str(error)
            log.info("a session drafts %s: %s", "by n-grams alone" if draft.drafting else "nothing", error)
            return draft

    def _fall_back(self, draft: DraftSession) -> None:
        """Let a session whose draft has failed go on by n-grams alone, in the background."""
        if self.fallback is not None and draft.pool is not None and draft.pool.has_model:
            log.info("a session goes on by n-grams alone: %s", draft.failure)
            self._keep(draft.fall_back(self.fallback))

    def _by_turn(self, draft: DraftSession) -> int:
        """Return in which order sessions change to another draft: those with a model's worker, n-grams alone, none."""
        return 2 if not draft.drafting else int(draft.pool is self.fallback)

    async def _free(self, pool: DraftPool) -> None:
        await pool.unused()
        await pool.close()
        self._retired.pop(pool, None)

    def _change(self, draft: DraftSession) -> None:
        """Let a session change to the present draft, in the background."""
        self._keep(draft.change_to(self.pool))

    def _keep(self, change: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(change)
        self._changes.add(task)
        task.add_done_callback(self._on_changed)

    def _on_changed(self, task: asyncio.Task[None]) -> None:
        self._changes.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a session could not change to another draft: %s", error, exc_info=error)
