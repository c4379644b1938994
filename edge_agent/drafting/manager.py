"""Decide which draft a client's sessions use, and replace it while they run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from edge_agent.drafting.draft_session import DraftSession
from edge_agent.drafting.pool import DraftPool
from outrider.core.protocol.device import DeviceSession

log = logging.getLogger(__name__)


class DraftManager:
    """Gives a client's sessions their draft, and replaces it. pool: the first draft; None for plain streaming."""

    def __init__(self, pool: DraftPool | None) -> None:
        self.pool = pool
        """The draft of new sessions."""
        self._sessions: set[DraftSession] = set()
        self._changes: set[asyncio.Task[None]] = set()
        self._retired: dict[DraftPool, asyncio.Task[None]] = {}
        """Replaced drafts, each with the task that frees it when its last session has left it."""

    @contextlib.asynccontextmanager
    async def session(self, session: DeviceSession) -> AsyncIterator[DraftSession]:
        """Give a session a worker; it gets none where all are in use or the draft cannot start."""
        pool = self.pool
        draft = DraftSession(session, pool, await pool.take() if pool is not None else None)
        self._sessions.add(draft)
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
        for draft in sorted(self._sessions, key=lambda draft: not draft.drafting):  # those without a draft come last
            self._change(draft)
        if old is not None and old is not pool:
            self._retired[old] = asyncio.create_task(self._free(old))

    def recall(self, release: str) -> bool:
        """Go back to a draft that sessions are still leaving; return False where there is none of this release."""
        pool = next((pool for pool in self._retired if pool.release == release and not pool.closing), None)
        if pool is None:
            return False
        self._retired.pop(pool).cancel()
        self.replace(pool)
        return True

    async def retired(self, within_s: float | None = None) -> bool:
        """Wait until replaced drafts are freed, so that one model is in memory; return False if that takes longer."""
        if self._retired:
            await asyncio.wait(self._retired.values(), timeout=within_s)
        return not self._retired

    async def close(self) -> None:
        """Free all drafts. The sessions must have ended."""
        for task in [*self._changes, *self._retired.values()]:
            task.cancel()
        for pool in [*self._retired, *([self.pool] if self.pool is not None else [])]:
            await pool.close()
        self._retired.clear()
        self.pool = None

    async def _free(self, pool: DraftPool) -> None:
        await pool.unused()
        await pool.close()
        self._retired.pop(pool, None)

    def _change(self, draft: DraftSession) -> None:
        """Let a session change to the present draft, in the background."""
        task = asyncio.create_task(draft.change_to(self.pool))
        self._changes.add(task)
        task.add_done_callback(self._on_changed)

    def _on_changed(self, task: asyncio.Task[None]) -> None:
        self._changes.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a session could not change to another draft: %s", error, exc_info=error)
