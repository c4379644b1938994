"""When decisions are made: beside the reports that ask for them, one at a time, in half of the time at most.

A verifier's lease and keys must not hang on its sessions' windows, and one with several hundred sessions takes a large
part of a second to decide about. What is not there in time is told with the next report, and what was decided last is
told again until there is something newer: a verifier that hears nothing for long goes back to its own setting.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from coordinator.records import WindowDecision

log = logging.getLogger(__name__)

WAIT_S = 1.0
"""How long a report waits for what is decided from it; its verifier waits for three seconds in all."""
STALE_S = 10.0
"""After which nobody is told of a decision any more."""

Windows = tuple[WindowDecision, ...]
Decide = Callable[[], Awaitable[Windows]]


@dataclass(frozen=True)
class _Made:
    windows: Windows
    at: float


class Deciding:
    """Of one coordinator. wait_s: as WAIT_S."""

    def __init__(self, wait_s: float = WAIT_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._wait_s = wait_s
        self._clock = clock
        self._turn = asyncio.Lock()
        self._rests_until = 0.0
        self._running: dict[str, asyncio.Task[None]] = {}
        """By verifier."""
        self._asked: dict[str, Decide] = {}
        """By verifier: how to decide from its last report."""
        self._made: dict[str, _Made] = {}
        """By verifier: what was decided last."""

    async def about(self, verifier_id: str, decide: Decide) -> Windows:
        """What was decided last about this verifier's sessions, in time or with an earlier report.

        decide: is what a decision whose turn comes later is made by, too; what it raises is logged.
        """
        self._asked[verifier_id] = decide
        running = self._running.get(verifier_id)
        if running is None:
            running = self._running[verifier_id] = asyncio.create_task(self._decide(verifier_id))
        await asyncio.wait({running}, timeout=self._wait_s)
        since = self._clock() - STALE_S
        self._made = {of: made for of, made in self._made.items() if made.at > since}
        made = self._made.get(verifier_id)
        return made.windows if made else ()

    async def _decide(self, verifier_id: str) -> None:
        try:
            async with self._turn:
                await asyncio.sleep(self._rests_until - self._clock())
                begun = self._clock()
                windows = await self._asked.pop(verifier_id)()
                ended = self._clock()
                self._rests_until = ended + (ended - begun)
            self._made[verifier_id] = _Made(windows, ended)
        except Exception as error:
            log.warning("nothing was decided about the windows of verifier %s: %s", verifier_id, error)
        finally:
            del self._running[verifier_id]
