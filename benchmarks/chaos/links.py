"""Break a connection's bytes on their way, and choose a live coordinator for each connection."""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Sequence

from benchmarks.support.network_link import MAX_CHUNK_BYTES, Link
from benchmarks.support.network_proxy import DelayProxy
from outrider.core.addresses import split_address

IN_USE_S = 0.3
LEAST_BYTES = 40
"""Bytes of a chunk that may carry a message of a session; pings of an idle connection are shorter."""
MOST_LOST = 64
"""Bytes that are lost at once, at most."""


class FaultyProxy(DelayProxy):
    """Pass bytes as DelayProxy does, and flip, lose or swallow some of them when told to."""

    def __init__(self, target: str, *, link: Link, seed: int = 0) -> None:
        super().__init__(target, link=link, seed=seed)
        self.tampered = 0
        """Chunks that were changed."""
        self._draw = random.Random(seed)
        self._passed = -math.inf
        self._armed: dict[bool, str] = {}
        self._swallowed: set[bool] = set()

    @property
    def in_use(self) -> bool:
        """Return whether something has just passed."""
        return time.monotonic() - self._passed < IN_USE_S

    def flip(self, *, up: bool) -> None:
        """Flip one bit of the next chunk in this direction."""
        self._armed[up] = "flip"

    def lose(self, *, up: bool) -> None:
        """Lose up to MOST_LOST bytes of the next chunk in this direction."""
        self._armed[up] = "lose"

    def disarm(self) -> None:
        """Leave the next chunks as they are."""
        self._armed.clear()

    def swallow(self, *, up: bool) -> None:
        """Take everything in this direction and pass nothing on, while the other direction goes on."""
        self._swallowed.add(up)

    def spare(self) -> None:
        """End `swallow` with a reset of all connections, whose bytes are missing."""
        self._swallowed.clear()
        self.reset_connections()

    async def _read(self, reader: asyncio.StreamReader, most: int, *, up: bool) -> bytes:
        while data := await super()._read(reader, most, up=up):
            if len(data) >= LEAST_BYTES:
                self._passed = time.monotonic()
            if up not in self._swallowed and (passed := self._tamper(data, up)):
                return passed
        return b""

    def _tamper(self, data: bytes, up: bool) -> bytes:
        how = self._armed.pop(up, "")
        if not how:
            return data
        self.tampered += 1
        at = self._draw.randrange(len(data))
        if how == "lose":
            return data[:at] + data[at + self._draw.randint(1, MOST_LOST) :]
        changed = bytearray(data)
        changed[at] ^= 1 << self._draw.randrange(8)
        return bytes(changed)


class Balancer(FaultyProxy):
    """Connect to one of several servers, as a load balancer that checks their health does.

    healthy: addresses of those that answer, which the caller keeps up to date. Where none does, all are tried.
    """

    def __init__(self, targets: Sequence[str], healthy: set[str], *, link: Link, seed: int = 0) -> None:
        super().__init__(targets[0], link=link, seed=seed)
        self._targets = list(targets)
        self._healthy = healthy
        self._turn = seed
        self._serves: dict[asyncio.Task[None], str] = {}

    def leave(self, address: str) -> None:
        """Reset the connections to a server that does not answer any more."""
        for task, served in list(self._serves.items()):
            if served == address:
                task.cancel()

    async def _dial(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        self._turn += 1
        candidates = [target for target in self._targets if target in self._healthy] or self._targets
        failure: OSError = ConnectionRefusedError("no server answers")
        for offset in range(len(candidates)):
            address = candidates[(self._turn + offset) % len(candidates)]
            try:
                pair = await asyncio.open_connection(*split_address(address), limit=MAX_CHUNK_BYTES)
            except OSError as error:
                failure = error
                continue
            if (task := asyncio.current_task()) is not None:
                self._serves[task] = address
                task.add_done_callback(lambda done: self._serves.pop(done, None))
            return pair
        raise failure
