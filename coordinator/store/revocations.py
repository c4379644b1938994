"""Keep what ends tickets before their time, so that every verifier learns of it with its next report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from coordinator.store import keys
from coordinator.store.redis_store import RedisStore
from outrider.wire.v1 import coordinator_pb2 as pb

MAX_REVOCATIONS = 65_536
"""Revocations that are kept; operators make few of them."""
AT_ONCE = 256
"""Revocations in one answer; the next report brings the rest."""


async def add(store: RedisStore, kind: Literal["session_id", "api_key_id"], name: str, *, keep_ms: int) -> None:
    """Revoke the tickets of a session or an API key. keep_ms: after so many milliseconds none of them is valid any
    more. Raises Unavailable."""
    await store.run("revoke", [keys.REVOKED], [f"{kind}:{name}", keep_ms, MAX_REVOCATIONS])


def from_reply(reply: Sequence[str], ticket_ms: int) -> list[pb.Revocation]:
    """Return the revocations of a script's reply, which has a time after each.

    ticket_ms: milliseconds for which a ticket made now may be valid.
    """
    found = []
    for written, at in zip(reply[::2], reply[1::2], strict=True):
        kind, _, name = written.partition(":")
        found.append(pb.Revocation(**{kind: name}, until_unix=(int(at) / 1000 + ticket_ms) / 1000))
    return found
