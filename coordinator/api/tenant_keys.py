"""Keep the tenants that operators create while the coordinator runs, in Redis, beside those of the settings, and the
limits of all.

Only the hash of a tenant's key is kept; the key itself is returned once, when it is made. Keys are random, with 256
bits, so neither a plain hash nor the time of a look-up tells anything about one.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from typing import Any

from coordinator.api.authentication import DEFAULT_TENANT, api_key_id, digest, tenant_name
from coordinator.config import TICKET_MS, CoordinatorConfig
from coordinator.store import keys, quotas, revocations
from coordinator.store.redis_codec import read
from coordinator.store.redis_store import Command, RedisStore, milliseconds
from outrider.core.errors import BadRequest, NotFound, Overloaded
from outrider.wire.v1 import coordinator_pb2 as pb

log = logging.getLogger(__name__)

MAX_TENANTS = 4_096
"""Tenants that operators may create: a list of all is read at once."""
MARKER = "has-tenants"
"""File in the state directory that is there once a tenant was created. Who wants none any more removes it."""
_RECORDS = (keys.TENANTS, keys.TENANT_LIMITS)


class TenantKeys:
    """Keeps the tenants that operators have created. Every method raises Unavailable while Redis is away."""

    def __init__(self, store: RedisStore, configured: Mapping[str, str], config: CoordinatorConfig) -> None:
        """Know the settings' tenants by `configured`, each with the id of its key.

        The state directory keeps that there are tenants, since callers without a key must not be admitted when Redis
        has lost them.
        """
        self._marker = config.state_dir.expanduser() / MARKER
        self._any_created = self._marker.exists()
        self._lost = False
        """Whether there were tenants, and Redis knows none."""
        self._store = store
        self._configured = configured

    async def holder(self, hashed: bytes | None) -> tuple[str, bool]:
        """Return the tenant whose key has this hash, "" if none has, and whether any tenant was ever created."""
        name, _ = await self._find(hashed.hex() if hashed else "")
        return name, self._any_created

    async def watch(self) -> None:
        """Remember what another coordinator may have done, create a tenant, and say if Redis has lost all of them."""
        _, any_created = await self._find("")
        if not any_created and self._any_created and not self._lost:
            log.warning(
                "Redis has lost the tenants that were created: callers are refused until `outrider tenants create` has"
                " made them anew; if nobody shall need a key any more, remove %s and restart",
                self._marker,
            )
        self._lost = self._any_created and not any_created

    async def create(self, name: str, limits: pb.TenantLimits) -> tuple[pb.Tenant, str]:
        """Create a tenant, or one anew that was revoked. Return it with its new key. Raises BadRequest.

        limits: its own. Without any a tenant that was revoked has the same as before.
        """
        if tenant_name(name) == DEFAULT_TENANT:
            raise BadRequest(f"tenant is {DEFAULT_TENANT}, the tenant of callers without a key; choose another name")
        if name in self._configured:
            raise BadRequest(f"tenant {name} has its key by this coordinator's settings; choose another name")
        key = f"outrider-{secrets.token_urlsafe(32)}"
        hashed = digest(key).hex()
        # Nothing is read behind the change: if that failed, the key would be lost.
        shown = await self._measured(pb.Tenant(name=name))

        def decide(known: Mapping[str, str], time: Any) -> tuple[float, list[Command]]:
            if (before := known.get(name)) and _tenant(before).key_hash == hashed:
                return _tenant(before).created_unix, []  # the reply to the attempt before was lost
            revoked = [one for one, record in known.items() if not _tenant(record).key_hash]
            if name in known and name not in revoked:
                raise BadRequest(
                    f"tenant {name} exists, and its key is not kept; `outrider tenants revoke {name}` first for a new"
                    " one"
                )
            full = name not in known and len(known) >= MAX_TENANTS  # then those that were revoked are forgotten
            if full and not revoked:
                raise BadRequest(f"there are {MAX_TENANTS} tenants, the most that can be created; revoke one first")
            made = pb.Tenant(name=name, created_unix=milliseconds(time) / 1000, key_hash=hashed)
            commands: list[Command] = [("HDEL", record, *revoked) for record in _RECORDS if full]
            commands += [("HSET", keys.TENANTS, name, made.SerializeToString())]
            commands += [("HSET", keys.TENANT_KEYS, hashed, name)]
            if limits.ListFields():
                commands += [("HSET", keys.TENANT_LIMITS, name, limits.SerializeToString())]
            return made.created_unix, commands

        reads = [("HGETALL", keys.TENANTS), ("TIME",)]
        shown.created_unix = await self._store.change("tenant_create", [keys.TENANTS], reads, decide)
        self._remember()
        log.info("tenant %s was created by an operator", name)
        if limits.ListFields():
            shown.limits.CopyFrom(quotas.in_force(limits))
        return shown, key

    async def set_limits(self, name: str, limits: pb.TenantLimits, *, afresh: bool) -> pb.Tenant:
        """Set limits of a tenant; with `afresh` the others are the coordinator's again. Raises NotFound."""
        configured = tenant_name(name) in self._configured

        def decide(known: str | None, held: str | None) -> tuple[pb.Tenant, list[Command]]:
            if not configured and known is None:
                raise _no_tenant(name)
            own = read(pb.TenantLimits, None if afresh else held, keys.TENANT_LIMITS)
            own.MergeFrom(limits)
            # The next report of its tokens brings it among the exhausted again, if it has to be there.
            commands: list[Command] = [("HSET", keys.TENANT_LIMITS, name, own.SerializeToString())]
            commands += [("ZREM", keys.EXHAUSTED, name)]
            return _tenant(known) if known else pb.Tenant(name=name), commands

        reads = [("HGET", keys.TENANTS, name), ("HGET", keys.TENANT_LIMITS, name)]
        tenant = await self._store.change("tenant_set", _RECORDS, reads, decide)
        said = ", ".join(f"{field.name} {value}" for field, value in limits.ListFields())
        log.info("limits of tenant %s were set by an operator: %s%s", name, said, " alone" if afresh else "")
        return await self._measured(tenant)

    async def revoke(self, name: str) -> pb.Tenant:
        """Revoke a tenant's key if it is valid, and the tickets of the sessions that it opened.

        Raises NotFound, or BadRequest for a tenant of the settings, whose key only they can take away.
        """
        [known] = await self._store.call("tenant", [("HGET", keys.TENANTS, tenant_name(name))])
        hashed = _tenant(known).key_hash if known else ""
        if hashed:
            # First, so that a key which is gone is never one whose tickets still serve.
            key_id = api_key_id(bytes.fromhex(hashed))
            await revocations.add(self._store, "api_key_id", key_id, keep_ms=TICKET_MS)

        def decide(known: str | None, time: Any) -> tuple[pb.Tenant | None, list[Command]]:
            tenant = _tenant(known) if known else None
            if tenant is None or not tenant.key_hash:
                return tenant, []
            if tenant.key_hash != hashed:  # the tickets of this one are not revoked
                raise Overloaded(f"tenant {name} was made anew meanwhile; ask again if its new key is to go, too")
            commands: list[Command] = [("HDEL", keys.TENANT_KEYS, tenant.key_hash)]
            tenant.key_hash, tenant.revoked_unix = "", milliseconds(time) / 1000
            return tenant, [*commands, ("HSET", keys.TENANTS, name, tenant.SerializeToString())]

        reads = [("HGET", keys.TENANTS, name), ("TIME",)]
        if tenant := await self._store.change("tenant_revoke", [keys.TENANTS], reads, decide):
            log.info("tenant %s was revoked by an operator", name)
            return await self._measured(tenant)
        if name in self._configured:
            await revocations.add(self._store, "api_key_id", self._configured[name], keep_ms=TICKET_MS)
            raise BadRequest(
                f"tenant {name} has its key by the coordinator's settings: its tickets are revoked, and the key opens"
                " sessions until you remove it there and restart"
            )
        raise _no_tenant(name)

    async def listed(self, after: str, limit: int) -> tuple[list[pb.Tenant], str]:
        """Return a page of the tenants after a name, and the name after which the next page begins; "" at the end."""
        [created] = await self._store.call("tenant_list", [("HGETALL", keys.TENANTS)])
        known = {name: pb.Tenant(name=name) for name in self._configured}
        known |= {name: _tenant(record) for name, record in created.items()}
        for name, tenant in known.items():
            tenant.name = name  # also of a record that is damaged
        found = [known[name] for name in sorted(known) if name > after]
        shown = await asyncio.gather(*map(self._measured, found[:limit]))
        return shown, found[limit - 1].name if len(found) > limit else ""

    async def _find(self, hashed: str) -> tuple[str, bool]:
        """Return the tenant whose key has this hash, "" if none has, and whether Redis knows any tenant, which is then
        remembered."""
        commands = [("HGET", keys.TENANT_KEYS, hashed), ("EXISTS", keys.TENANTS)]
        name, any_created = await self._store.call("tenant_of", commands)
        if any_created and not self._any_created:
            self._remember()
        return name or "", bool(any_created)

    async def _measured(self, tenant: pb.Tenant) -> pb.Tenant:
        """Return a tenant as operators see it, with its limits and what it uses."""
        limits, use = await quotas.find(self._store, tenant.name)
        tenant.MergeFrom(pb.Tenant(limits=limits, use=use, configured=tenant.name in self._configured))
        tenant.ClearField("key_hash")
        return tenant

    def _remember(self) -> None:
        """Keep that callers need a key from now on, whatever becomes of Redis."""
        self._any_created = True
        try:
            self._marker.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._marker.touch(mode=0o600)
        except OSError as error:
            log.error(
                "%s cannot be written: %s; after a restart with an empty Redis callers would need no key",
                self._marker,
                error.strerror,
            )


def _tenant(record: str) -> pb.Tenant:
    return read(pb.Tenant, record, keys.TENANTS)


def _no_tenant(name: str) -> NotFound:
    return NotFound(f"no tenant {name}; `outrider tenants list` shows them")
