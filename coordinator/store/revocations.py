"""Keep what ends tickets before their time, so that every verifier learns of it with its next report."""

from __future__ import annotations

from collections.abc import Sequence

from coordinator.records import Revocation
from coordinator.store import keys
from coordinator.store.redis_store import RedisStore

MAX_REVOCATIONS = 65_536
"""Revocations that are kept; operators make few of them."""
AT_ONCE = 256
"""Revocations in one answer; the next report brings the rest."""


async def add(store: RedisStore, revocation: Revocation, *, keep_ms: int) -> None:
    """Revoke tickets. keep_ms: after so many milliseconds none of them is valid any more. Raises Unavailable."""
    await store.run("revoke", [keys.REVOKED], [revocation.written, keep_ms, MAX_REVOCATIONS])


def from_reply(reply: Sequence[str], seen: int, ticket_ms: int) -> tuple[tuple[Revocation, ...], int]:
    """Return the revocations of a script's reply, which has a time after each, and the time of the last one.

    seen: the time if there are none. ticket_ms: milliseconds for which a ticket made now may be valid.
    """
    found = []
    for written, at in zip(reply[::2], reply[1::2], strict=True):
        kind, _, name = written.partition(":")
        seen = int(at)
        found.append(Revocation(kind, name, (seen / 1000 + ticket_ms) / 1000))  # type: ignore[arg-type]  # we wrote it
    return tuple(found), seen
