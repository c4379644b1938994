"""Tell whether a request would find its cluster."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from edge_agent.sdk.client import AsyncClient
from outrider.core.errors import OutriderError, Overloaded

ANSWER_S = 2.7
"""Seconds in which a health check, which waits 3, gets an answer."""
FRESH_S = 5.0
"""Seconds for which a probe's result stands."""


class Readiness:
    """Asks the coordinator and a verifier as a request would, at most every `FRESH_S`, and only while somebody asks."""

    def __init__(self, client: AsyncClient, clock: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._clock = clock
        self._result = ""
        self._until = float("-inf")
        self._probing = asyncio.Lock()

    async def unready(self) -> str:
        """Return why a request would fail now, by a fresh probe; "" if it would be served."""
        async with self._probing:
            if self._clock() >= self._until:
                self._result = await self._probed()
                self._until = self._clock() + FRESH_S
            return self._result

    async def _probed(self) -> str:
        try:
            async with asyncio.timeout(ANSWER_S):
                await self._client.probe()
        except TimeoutError:
            return f"the cluster has not answered within {ANSWER_S:g} s"
        except Overloaded:
            return ""  # it is there, and requests wait for room
        except OutriderError as error:
            return str(error)
        return ""
