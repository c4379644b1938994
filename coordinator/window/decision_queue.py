"""Make decisions on windows beside the reports that ask for them, a few at a time.

A verifier's lease and keys must not wait for its sessions' windows, and deciding on several hundred sessions takes a
part of a second. A decision that is not made in time is sent with the next report, and the last decision is sent again
until there is a newer one: a verifier that gets none for long goes back to its own setting.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from coordinator.records import Decisions

log = logging.getLogger(__name__)

WAIT_S = 1.0
"""Seconds that a report waits for the decisions made from it; its verifier waits for three seconds in all."""
STALE_S = 10.0
"""Age after which decisions are not sent any more."""

Keep = Callable[[str, Decisions], Awaitable[Decisions]]
Decide = Callable[[], Awaitable[Decisions]]


class DecisionQueue:
    """Makes one coordinator's decisions. wait_s: most seconds that a caller waits.

    at_once: most decisions under way that another process makes; in this one it is one at a time.
    keep: stores decisions while the next ones are made, and returns those that hold; what was decided by default.
    """

    def __init__(
        self,
        wait_s: float = WAIT_S,
        clock: Callable[[], float] = time.monotonic,
        keep: Keep | None = None,
        at_once: int = 1,
    ) -> None:
        self._wait_s = wait_s
        self._keep = keep
        self._clock = clock
        self._turns = {False: asyncio.Semaphore(1), True: asyncio.Semaphore(at_once)}
        """By whether another process decides."""
        self._running: dict[str, asyncio.Task[None]] = {}
        """Tasks by verifier."""
        self._asked: dict[str, Decide] = {}
        """Functions that decide from the last report, by verifier."""
        self._made: dict[str, tuple[Decisions, float]] = {}
        """The last decisions and the time when they were made, by verifier."""

    async def decide(self, verifier_id: str, decide: Decide, *, elsewhere: bool = False) -> Decisions:
        """Return the last decisions on this verifier's sessions, made in time or with an earlier report.

        decide: also makes the decision if its turn comes later; the queue logs what it raises. elsewhere: whether it
        leaves that to another process.
        """
        await asyncio.wait({self.ask(verifier_id, decide, elsewhere=elsewhere)}, timeout=self._wait_s)
        return self.last(verifier_id)

    def last(self, verifier_id: str) -> Decisions:
        """Return the last decisions that were made here on this verifier's sessions, none if that is long ago."""
        since = self._clock() - STALE_S
        self._made = {name: (made, at) for name, (made, at) in self._made.items() if at > since}
        return self._made.get(verifier_id, (Decisions(), since))[0]

    @property
    def waiting(self) -> int:
        """Return for how many verifiers decisions are being made, or wait for their turn."""
        return len(self._running)

    def ask(self, verifier_id: str, decide: Decide, *, elsewhere: bool = False) -> asyncio.Task[None]:
        """Have decisions made in their turn, from this report or a later one; return the task that makes them."""
        self._asked[verifier_id] = decide
        if verifier_id not in self._running:
            self._running[verifier_id] = asyncio.create_task(self._run(verifier_id, self._turns[elsewhere]))
        return self._running[verifier_id]

    async def _run(self, verifier_id: str, turns: asyncio.Semaphore) -> None:
        try:
            async with turns:
                decisions = await self._asked.pop(verifier_id)()
                ended = self._clock()
            if self._keep is not None:
                decisions = await self._keep(verifier_id, decisions)
            self._made[verifier_id] = decisions, ended
        except Exception as error:
            log.warning("nothing was decided about the windows of verifier %s: %s", verifier_id, error)
        finally:
            del self._running[verifier_id]
