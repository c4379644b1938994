"""Share the deciding about verifiers among the coordinators that are alive, and hand reports to those who decide.

Each coordinator renews a lease in Redis. Of those that have one, the owner of a verifier is the coordinator whose id
hashes highest together with the verifier's (rendezvous hashing): each of them names the same one without asking, the
shares are even, and a coordinator that comes or goes moves no share but its own. For a moment two may have read
different lists; so what is decided about a verifier is written under a lease of its owner's, too
(`lua/set_decisions.lua`).
"""

from __future__ import annotations

import hashlib
import math
import secrets
import time
from collections.abc import Sequence

from coordinator.store import keys
from coordinator.store.redis_store import RedisStore

BEAT_S = 0.25
"""Seconds between two renewals, and between two looks for reports that others have handed over."""
LEASE_MS = 1_200
"""Milliseconds without a renewal after which a coordinator's verifiers are others': three of them may be late. A
coordinator that dies is missed after this and a beat at most, which leaves a second of the three in which another one
has decided."""
HANDED_MS = 10_000
"""Milliseconds for which a report that was handed over is kept; its verifier sends another one each second."""


class Ownership:
    """Knows which coordinator decides about a verifier. Methods that await raise Unavailable while Redis is away."""

    def __init__(self, store: RedisStore) -> None:
        self.id = secrets.token_hex(8)
        """This coordinator's, new at each start."""
        self.live: Sequence[str] = (self.id,)
        """Coordinators with a lease, by what was read last."""
        self.read_at = -math.inf
        """When that was, by the monotonic clock."""
        self._store = store

    @property
    def age_ms(self) -> int:
        """Return how many milliseconds ago `live` was read: of who has come since, it says nothing."""
        return int(1_000 * min(time.monotonic() - self.read_at, 1e6))

    def owner(self, verifier_id: str) -> str:
        """Return the id of the coordinator that decides about a verifier."""
        return max(self.live, key=lambda one: hashlib.sha256(f"{one} {verifier_id}".encode()).digest())

    async def beat(self) -> bool:
        """Renew this coordinator's lease and read the others'; return whether any has come or gone."""
        begun = time.monotonic()
        live = sorted(await self._store.run("coordinators", [keys.COORDINATORS], [self.id, LEASE_MS]))
        before, self.live, self.read_at = self.live, live, begun
        return list(before) != live

    async def leave(self) -> None:
        """End the lease, so that others need not wait for its end, and write nothing more."""
        self.read_at = -math.inf
        await self._store.call("leave", [("ZREM", keys.COORDINATORS, self.id), ("DEL", keys.handed(self.id))])

    async def hand_over(self, verifier_id: str, report: str) -> None:
        """Give a report to the verifier's owner, in place of one that it has not taken yet."""
        key = keys.handed(self.owner(verifier_id))
        await self._store.call("hand_over", [("HSET", key, verifier_id, report), ("PEXPIRE", key, HANDED_MS)])

    async def taken(self) -> dict[str, str]:
        """Take the reports that others have handed over, by verifier."""
        flat = await self._store.run("take_handed", [keys.handed(self.id)], [])
        return dict(zip(flat[::2], flat[1::2], strict=True))
