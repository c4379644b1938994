"""The draft that sessions get, and how all of them move to another one while they run."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Protocol

from edge_agent.drafting.draft_session import Lent
from edge_agent.drafting.pool import DraftPool
from edge_agent.drafting.worker import DraftWorker

log = logging.getLogger(__name__)


class Driver(Protocol):
    """What a seat needs of a session's driver."""

    def succeed(self, lent: Lent | None, swapped: Callable[[bool], None]) -> None: ...

    def stay(self) -> None: ...


class DraftSession:
    """A session's worker, and whose it is. Made by `DraftManager.seat`."""

    def __init__(self, pool: DraftPool | None, worker: DraftWorker | None) -> None:
        self.pool = pool
        self.worker = worker
        self._driver: Driver | None = None
        self._wanted = pool
        """Where it is to go at last."""
        self._left = False

    @property
    def lent(self) -> Lent | None:
        return _lent(self.pool, self.worker)

    def drives(self, driver: Driver) -> None:
        """Whoever is to be told of another worker."""
        self._driver = driver

    async def move(self, pool: DraftPool | None) -> None:
        """Get a worker of another pool and hand it to the driver. Where there is none the session keeps what it has."""
        self._wanted = pool
        if self.pool is pool and self._driver is not None:
            self._driver.stay()
            return
        worker = await pool.take() if pool is not None else None
        if pool is not None and worker is None:
            return
        if self._left or self._driver is None or self._wanted is not pool:
            _give_back(pool, worker)
            return

        def swapped(taken: bool) -> None:
            if not taken:
                _give_back(pool, worker)
                return
            free = self.pool, self.worker
            self.pool, self.worker = pool, worker
            _give_back(*free)

        self._driver.succeed(_lent(pool, worker), swapped)

    def leave(self) -> None:
        self._left = True
        _give_back(self.pool, self.worker)
        self.worker = None


class DraftManager:
    """One draft for all sessions of a client. pool: the first one; None for plain cloud streaming."""

    def __init__(self, pool: DraftPool | None) -> None:
        self.pool = pool
        """Where new sessions get their workers."""
        self._seats: set[DraftSession] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._leaving: dict[DraftPool, asyncio.Task[None]] = {}
        """Pools that are freed when their last session has left them."""
        self._closing: set[DraftPool] = set()
        """Those that are being freed: they cannot be recalled."""

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[DraftSession]:
        """For one session. It has no worker where all are lent out or the draft cannot start."""
        pool = self.pool
        seat = DraftSession(pool, await pool.take() if pool is not None else None)
        self._seats.add(seat)
        try:
            yield seat
        finally:
            self._seats.discard(seat)
            seat.leave()

    def begin(self, seat: DraftSession, driver: Driver) -> None:
        """The seat's session begins, with the draft that it was given or the one that has replaced it meanwhile."""
        seat.drives(driver)
        if seat.pool is not self.pool:
            self._in_background(seat.move(self.pool))

    def replace(self, pool: DraftPool | None) -> None:
        """New sessions get it at once, live ones when it has read what they hold; the one before is freed then."""
        old, self.pool = self.pool, pool
        for seat in sorted(self._seats, key=lambda seat: seat.worker is None):  # who has no draft goes last
            self._in_background(seat.move(pool))
        if old is not None and old is not pool:
            self._leaving[old] = asyncio.create_task(self._free(old))

    def recall(self, release: str) -> bool:
        """Replace the draft by one that sessions are just leaving; False where that is none of them."""
        pool = next((pool for pool in self._leaving.keys() - self._closing if pool.release == release), None)
        if pool is None:
            return False
        self._leaving.pop(pool).cancel()
        self.replace(pool)
        return True

    async def single(self, within_s: float | None = None) -> bool:
        """Wait until no more than one model is loaded; False where that is not so in time."""
        if self._leaving:
            await asyncio.wait(self._leaving.values(), timeout=within_s)
        return not self._leaving

    async def close(self) -> None:
        """After the sessions have ended."""
        for task in [*self._tasks, *self._leaving.values()]:
            task.cancel()
        for pool in [*self._leaving, *([self.pool] if self.pool is not None else [])]:
            await pool.__aexit__(None, None, None)
        self._leaving.clear()
        self.pool = None

    async def _free(self, pool: DraftPool) -> None:
        await pool.all_back()
        self._closing.add(pool)
        await pool.__aexit__(None, None, None)
        self._closing.discard(pool)
        self._leaving.pop(pool, None)

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a session could not move to another draft: %s", error, exc_info=error)


def _lent(pool: DraftPool | None, worker: DraftWorker | None) -> Lent | None:
    return Lent(worker, pool.release, pool.name) if pool is not None and worker is not None else None


def _give_back(pool: DraftPool | None, worker: DraftWorker | None) -> None:
    if pool is not None and worker is not None:
        pool.give_back(worker)
