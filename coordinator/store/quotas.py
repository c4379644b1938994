"""Keep what tenants may use and what they use. `lua/place.lua` holds one against the other.

What a tenant has opened and generated is an amount each, of which the limit is taken off in a minute: a bucket that
holds a minute's worth. It may overflow with tokens, which are counted when they have been generated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields

from coordinator.config import TenantLimits
from coordinator.store import keys
from coordinator.store.redis_store import RedisStore
from outrider.core.errors import Overloaded

LIMITS = tuple(field.name for field in fields(TenantLimits))
USE_MS = 7_200_000
"""Tokens keep no tenant out for more than an hour (report.lua); what is older does not count."""
RUNNING_MS = 60_000
"""A session that was reported so lately may move to another verifier, whatever its tenant has used: longer than all
verifiers take to restart."""
WAIT_MS = 3_000
"""A tenant that got no place is told to ask again in a second; so long it is taken to wait for one."""
ATTACH_GRACES = 6
"""The record of a session that no device attaches to is kept for so many times as long as its place."""


def written(limits: Mapping[str, int]) -> str:
    """Return limits as Redis keeps them: one after the other, "-" for those that are the coordinator's."""
    return " ".join(str(limits.get(name, "-")) for name in LIMITS)


def limits_from(record: str | None, defaults: TenantLimits) -> TenantLimits:
    """Return the limits that hold. record: those that an operator has set; None for none."""
    own = dict(zip(LIMITS, (record or "").split(), strict=False))
    set_here = {name: int(value) for name, value in own.items() if value.isdigit()}
    return TenantLimits(**(asdict(defaults) | set_here))


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


async def set_limits(store: RedisStore, tenant: str, limits: Mapping[str, int], *, afresh: bool, known: bool) -> bool:
    """Set some limits of a tenant. Return False if no such tenant was created, unless it is known otherwise.

    afresh: the others are the coordinator's again. Raises Unavailable.
    """
    touched = [keys.TENANTS, keys.TENANT_LIMITS, keys.EXHAUSTED]
    return bool(await store.run("tenant_set", touched, [tenant, int(known), int(afresh), written(limits)]))


async def find(
    store: RedisStore, tenants: Sequence[str], defaults: TenantLimits
) -> dict[str, tuple[TenantLimits, dict[str, float]]]:
    """Return limits and use of these tenants. Raises Unavailable.

    The use has the names of pb.TenantUse: what counts against each limit, or roughly that of the last minute where
    there is none.
    """
    touched = [key for name in tenants for key in (keys.tenant_use(name), keys.tenant_places(name))]
    arguments = [defaults.opens_per_minute, defaults.tokens_per_minute, *tenants]
    reply = await store.run("tenant_use", [keys.TENANT_LIMITS, *touched], arguments)
    rows = zip(tenants, reply[::4], reply[1::4], reply[2::4], reply[3::4], strict=True)
    return {
        name: (limits_from(record, defaults), {"places": places, "opens": float(opens), "tokens": float(tokens)})
        for name, record, opens, tokens, places in rows
    }
