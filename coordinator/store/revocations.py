"""Keep what ends tickets before their time, so that every verifier learns of it with its next report."""

from __future__ import annotations

from typing import Literal

from coordinator.config import TICKET_MS
from coordinator.store import keys
from coordinator.store.redis_store import RedisStore, scored
from outrider.wire.v1 import coordinator_pb2 as pb

MAX_REVOCATIONS = 65_536
"""Revocations that are kept; operators make few of them."""
AT_ONCE = 256
"""Revocations in one answer; the next report brings the rest."""


async def add(store: RedisStore, kind: Literal["session_id", "api_key_id"], name: str, *, keep_ms: int) -> None:
    """Revoke the tickets of a session or an API key. keep_ms: after so many milliseconds none of them is valid any
    more. Raises Unavailable."""
    await store.run("revoke", [keys.REVOKED], [f"{kind}:{name}", keep_ms, MAX_REVOCATIONS])


async def since(store: RedisStore, seen: int) -> tuple[list[pb.Revocation], int]:
    """Return what was revoked since a time (us), AT_ONCE at most, and the time of the last of them.

    A time after the newest one's is of a store that has been lost: all are told again. Raises Unavailable.
    """
    later = ("ZRANGEBYSCORE", keys.REVOKED, f"({seen}", "+inf", "WITHSCORES", "LIMIT", 0, AT_ONCE)
    commands = [later, ("ZRANGE", keys.REVOKED, -1, -1, "WITHSCORES")]
    found, newest = map(scored, await store.call("revocations", commands))
    if not found:
        return await since(store, 0) if newest and seen > newest[0][1] else ([], seen)
    revoked = []
    for written, at in found:
        kind, _, name = written.partition(":")
        revoked.append(pb.Revocation(**{kind: name}, until_unix=(at / 1000 + TICKET_MS) / 1000))
    return revoked, found[-1][1]
