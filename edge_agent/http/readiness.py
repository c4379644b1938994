"""Tell whether a request would find its cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from edge_agent.sdk.client import AsyncClient
from outrider.core.errors import OutriderError, Overloaded

ANSWER_S = 2.7
"""Seconds in which a health check, which waits 3, gets an answer; a probe over a slow network goes on after it."""
FRESH_S = 5.0
"""Seconds for which a probe's result stands, and then until the next one's."""


class Readiness:
    """Asks the coordinator and a verifier as a request would, at most every `FRESH_S`, and only while somebody asks."""

    def __init__(self, client: AsyncClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._result = "the cluster has not answered yet"
        self._begun = self._until = float("-inf")
        self._probing: asyncio.Task[None] | None = None

    async def unready(self) -> str:
        """Return why a request would fail now, by the last probe that has ended; "" if it would be served."""
        if self._probing is None and self._clock() >= self._until:
            self._probing, self._begun = asyncio.create_task(self._probed()), self._clock()
        if probing := self._probing:  # those who ask at one time share a probe
            await asyncio.wait({probing}, timeout=ANSWER_S)
            if probing.done():
                probing.result()
            elif (waited_s := self._clock() - self._begun) >= self._client.probe_s:
                self._result = f"the cluster has not answered within {waited_s:.1f} s"
        return self._result

    async def _probed(self) -> None:
        try:
            await self._client.probe()
            self._result = ""
        except Overloaded:
            self._result = ""  # it is there, and requests wait for room
        except OutriderError as error:
            self._result = str(error)
        finally:
            self._probing, self._until = None, self._clock() + FRESH_S
