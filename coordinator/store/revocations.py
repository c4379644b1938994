"""Keep what ends tickets before their time, so that every verifier learns of it with its next report."""

from __future__ import annotations

from typing import Any, Literal

from coordinator.config import TICKET_MS
from coordinator.store import keys
from coordinator.store.redis_store import Command, RedisStore, scored
from outrider.wire.v1 import coordinator_pb2 as pb

MAX_REVOCATIONS = 65_536
"""Revocations that are kept; operators make few of them."""
AT_ONCE = 256
"""Revocations in one answer; the next report brings the rest."""


async def add(store: RedisStore, kind: Literal["session_id", "api_key_id"], name: str, *, keep_ms: int) -> None:
    """Revoke the tickets of a session or an API key. keep_ms: after so many milliseconds none of them is valid any
    more. Raises Unavailable."""
    await store.run("revoke", [keys.REVOKED], [f"{kind}:{name}", keep_ms, MAX_REVOCATIONS])


def reads(seen: int) -> list[Command]:
    """Return the commands whose replies `told` takes. seen: time (us) of the last revocation that a verifier knows."""
    later = ("ZRANGEBYSCORE", keys.REVOKED, f"({seen}", "+inf", "WITHSCORES", "LIMIT", 0, AT_ONCE)
    return [later, ("ZRANGE", keys.REVOKED, -1, -1, "WITHSCORES")]


def told(later: Any, newest: Any, seen: int) -> tuple[list[pb.Revocation], int]:
    """Return what was revoked since, AT_ONCE at most, and the time of the last of them.

    A time after the newest one's is of a store that has been lost: then it is 0, and the next report is told all.
    """
    found, last = scored(later), scored(newest)
    if not found:
        return [], 0 if last and seen > last[0][1] else seen
    revoked = []
    for written, at in found:
        kind, _, name = written.partition(":")
        revoked.append(pb.Revocation(**{kind: name}, until_unix=(at / 1000 + TICKET_MS) / 1000))
    return revoked, found[-1][1]
