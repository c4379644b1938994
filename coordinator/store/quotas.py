"""Keep what tenants may use and what they use.

What a tenant has opened and generated is an amount each, of which the limit is taken off in a minute: a bucket that
holds a minute's worth. It may overflow with tokens, which are counted when they have been generated. A session is
counted first, then placed, and counted no longer if it could not be placed. Of a coordinator that
dies between, one session too many counts, for a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from coordinator.store import keys, redis_codec
from coordinator.store.redis_store import RedisStore, milliseconds
from outrider.core.errors import Overloaded, Unavailable
from outrider.wire.v1 import coordinator_pb2 as pb

DEFAULTS = pb.TenantLimits(max_places=0, opens_per_minute=6_000, tokens_per_minute=0, max_streams=0)
"""Limits of tenants for whom an operator has set no others: they bound what a flood costs the coordinator, and the
memory of Redis."""
GREATEST = pb.TenantLimits(
    max_places=1_000_000, opens_per_minute=1_000_000, tokens_per_minute=1_000_000_000, max_streams=1_000_000
)
"""Bounds of tenants' limits."""
USE_MS = 7_200_000
"""Tokens keep no tenant out for more than an hour (tenant_use.lua); what is older does not count."""
RUNNING_MS = 60_000
"""A session that was reported so lately may move to another verifier, whatever its tenant has used: longer than all
verifiers take to restart."""
MOST_MOVES = 16
"""Moves after which a session is taken for a new one: otherwise its tenant could generate with it without end."""
ASK_MS = 1_000
"""A session that its tenant's places or its share of them do not allow may be asked for again after so long."""
WAIT_MS = 3_000
"""A tenant that got no place is told to ask again in a second; so long it is taken to wait for one."""
MOST_WAITING = 64
"""Of the tenants that wait for a place at a target, those that asked last are looked at."""
MOST_EXHAUSTED = 256
"""Tenants whose tokens are used up that a verifier is told of."""


def limits_from(record: str | None) -> pb.TenantLimits:
    """Return the limits that hold. record: those that an operator has set, as Redis keeps them; None for none."""
    return in_force(redis_codec.read(pb.TenantLimits, record, keys.TENANT_LIMITS))


def in_force(own: pb.TenantLimits) -> pb.TenantLimits:
    """Return the limits that hold where an operator has set these."""
    limits = pb.TenantLimits()
    limits.CopyFrom(DEFAULTS)
    limits.MergeFrom(own)
    return limits


def refusal(tenant: str, which: str, limit: int, after_ms: int) -> Overloaded:
    """Return the error for a session that its tenant's limits do not allow."""
    after_s = after_ms / 1000
    when = f"ask again in {after_s:.3g} s"
    what = {
        "tokens": f"tenant {tenant} has had more than its {limit} tokens per minute generated; {when}",
        "opens": f"tenant {tenant} opens more than its {limit} sessions per minute; {when}",
        "places": f"tenant {tenant} has all the {limit} places that it may have; ask again once a session has ended",
        "share": f"tenant {tenant} has {limit} places, and a tenant with fewer waits for one; {when}",
    }[which]
    return Overloaded(what, retry_after_s=after_s)


async def count_open(store: RedisStore, tenant: str, limits: pb.TenantLimits) -> None:
    """Count a session that its tenant opens. Raises Overloaded or Unavailable."""
    use = await _use(store, tenant, limits, opens=1)
    if use.reached:
        limit = {"opens": limits.opens_per_minute, "tokens": limits.tokens_per_minute}[use.reached]
        raise refusal(tenant, use.reached, limit, int(use.after_ms))


async def take_back(store: RedisStore, tenant: str) -> None:
    """Count a session no longer, since it could not be placed."""
    with contextlib.suppress(Unavailable):  # one too many counts then, for a minute
        await store.call("tenant_use", [("HINCRBYFLOAT", keys.tenant_use(tenant), "opens", -1)])


async def count_tokens(
    store: RedisStore, tokens: Mapping[str, int], limits: Mapping[str, pb.TenantLimits], exhausted: Collection[str]
) -> tuple[str, ...]:
    """Count generated tokens by tenant; return whose tokens are used up. Raises Unavailable.

    exhausted: whose were before.
    """
    uses = await asyncio.gather(*(_use(store, name, limits[name], tokens=count) for name, count in tokens.items()))
    until_ms = {name: int(use.until_ms) for name, use in zip(tokens, uses, strict=True)}
    used_up = {name: until for name, until in until_ms.items() if until}
    over = [name for name in exhausted if until_ms.get(name) == 0]
    commands: list[tuple[Any, ...]] = [("ZADD", keys.EXHAUSTED, until, name) for name, until in used_up.items()]
    commands += [("ZREM", keys.EXHAUSTED, *over)] if over else []
    await store.call("exhausted", [*commands, ("PEXPIRE", keys.EXHAUSTED, USE_MS)] if commands else [])
    return tuple(sorted(({*exhausted} | {*used_up}) - {*over}))[:MOST_EXHAUSTED]


async def find(store: RedisStore, tenant: str) -> tuple[pb.TenantLimits, pb.TenantUse]:
    """Return limits and use of a tenant. Raises Unavailable."""
    [time] = await store.call("time", [("TIME",)])
    since = f"({milliseconds(time)}"
    reads = [("HGET", keys.TENANT_LIMITS, tenant), ("ZCOUNT", keys.tenant_places(tenant), since, "+inf")]
    record, places = await store.call("tenant_limits", reads)
    limits = limits_from(record)
    use = await _use(store, tenant, limits)
    return limits, pb.TenantUse(places=places, opens=float(use.opens), tokens=float(use.tokens))


class _Use(NamedTuple):
    """The reply of tenant_use.lua."""

    opens: str
    tokens: str
    reached: str
    """The limit that is reached: "tokens", "opens" or ""."""
    after_ms: int
    until_ms: str


async def _use(store: RedisStore, tenant: str, limits: pb.TenantLimits, *, opens: int = 0, tokens: int = 0) -> _Use:
    """Count what a tenant opens or has generated, and return what it uses."""
    arguments = [limits.opens_per_minute, limits.tokens_per_minute, USE_MS, opens, tokens]
    return _Use(*await store.run("tenant_use", [keys.tenant_use(tenant)], arguments))
