"""The target's kit: loaded once, for all who wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from edge_agent.sdk.background_tasks import Tasks
from edge_agent.target.bundle import TargetKit

Assemble = Callable[[], Coroutine[Any, Any, TargetKit]]


class Preparation:
    """Of one client. Loading goes on where whoever waits for it leaves: the next one finds it further, or done."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._lock = asyncio.Lock()
        self._running: asyncio.Task[TargetKit] | None = None
        self.kit: TargetKit | None = None
        """Once it is there; whoever clears this closes it."""

    async def of(self, assemble: Assemble) -> TargetKit:
        """Raises what `assemble` raises, and BadRequest once the client is closed."""
        async with self._lock:
            self._tasks.check_open()
            if self.kit is not None:
                return self.kit
            if self._running is None or self._running.done():
                self._running = self._tasks.begin(self._keep(assemble))
            return await self._tasks.result_of(self._running)

    async def _keep(self, assemble: Assemble) -> TargetKit:
        self.kit = await assemble()
        return self.kit
