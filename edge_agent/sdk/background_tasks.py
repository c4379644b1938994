"""Keep a client's work that outlives its callers, and end it with the client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Collection, Coroutine
from typing import Any, TypeVar

from outrider.core.errors import BadRequest, OutriderError

log = logging.getLogger(__name__)

_A = TypeVar("_A")
_CLOSE_S = 1.0
"""Seconds that closing waits for sessions to end, and as long again for their release at the coordinator."""


class BackgroundTasks:
    """The tasks of one client, and whether it is closed."""

    def __init__(self) -> None:
        self.closed = False
        self._background: set[asyncio.Future[Any]] = set()
        self._waiting: set[asyncio.Task[Any]] = set()
        """Work that closing cancels: placing sessions, and fetching and loading the target's artifacts."""

    def check_open(self) -> None:
        if self.closed:
            raise BadRequest("the client is closed; make another one")

    def begin(self, work: Coroutine[Any, Any, _A]) -> asyncio.Task[_A]:
        """Start work that goes on until it ends or the client is closed."""
        task = asyncio.create_task(work)
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)
        return task

    async def result_of(self, task: asyncio.Task[_A]) -> _A:
        """Wait for what `begin` returned, which goes on if the caller is cancelled.

        Raises BadRequest if closing the client has ended it.
        """
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or not caller.cancelling():
                self.check_open()
            raise

    def keep(self, task: asyncio.Future[Any]) -> None:
        """Let a task outlive its request; closing waits for it for a while."""
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    def in_background(self, work: Awaitable[None]) -> None:
        """Start work whose result is not awaited; its core errors are logged."""
        self.keep(asyncio.ensure_future(_quietly(work)))

    async def end(self, streams: Collection[Awaitable[None]]) -> None:
        """Cancel what waits; let streams, then the background, come to their end."""
        for waiting in self._waiting:
            waiting.cancel()
        await _ended([*(asyncio.ensure_future(stream) for stream in streams), *self._waiting])
        await _ended(self._background)


async def _quietly(work: Awaitable[None]) -> None:
    try:
        await work
    except OutriderError as error:
        log.info("a session could not be closed at the coordinator: %s", error)


async def _ended(tasks: Collection[asyncio.Future[Any]]) -> None:
    """Let tasks end by themselves for a while, then cancel them."""
    if tasks:
        _, pending = await asyncio.wait(tasks, timeout=_CLOSE_S)
        for task in pending:
            task.cancel()
