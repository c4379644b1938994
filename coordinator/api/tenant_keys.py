"""Keep the tenants that operators create while the coordinator runs, in Redis, beside those of the settings, and the
limits of all.

Only the hash of a tenant's key is kept; the key itself is returned once, when it is made. Keys are random, with 256
bits, so neither a plain hash nor the time of a look-up tells anything about one.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from coordinator.api.authentication import DEFAULT_TENANT, api_key_id, digest, tenant_name
from coordinator.config import TICKET_MS, CoordinatorConfig
from coordinator.store import keys, quotas, revocations
from coordinator.store.redis_store import Command, RedisStore, milliseconds
from outrider.core.errors import BadRequest, NotFound
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
        name, any_created = await self._find(hashed.hex() if hashed else "")
        if any_created and not self._any_created:
            self._remember()
        return name, self._any_created

    async def watch(self) -> None:
        """Remember what another coordinator may have done, create a tenant, and say if Redis has lost all of them."""
        _, any_created = await self._find("")
        if any_created and not self._any_created:
            self._remember()
        if not any_created and self._any_created and not self._lost:
            log.warning(
                "Redis has lost the tenants that were created: callers are refused until `outrider tenants create` has"
                " made them anew; if nobody shall need a key any more, remove %s and restart",
                self._marker,
            )
        self._lost = self._any_created and not any_created

    async def create(self, name: str, limits: Mapping[str, int]) -> tuple[pb.Tenant, str]:
        """Create a tenant, or one anew that was revoked. Return it with its new key. Raises BadRequest.

        limits: its own, by their names. Without any a tenant that was revoked has the same as before.
        """
        if tenant_name(name) == DEFAULT_TENANT:
            raise BadRequest(f"tenant is {DEFAULT_TENANT}, the tenant of callers without a key; choose another name")
        if name in self._configured:
            raise BadRequest(f"tenant {name} has its key by this coordinator's settings; choose another name")
        key = f"outrider-{secrets.token_urlsafe(32)}"
        hashed, own = digest(key).hex(), quotas.written(limits) if limits else None

        def decide(known: Mapping[str, str], held: str | None, time: Any) -> tuple[Any, list[Command]]:
            revoked = [one for one, written in known.items() if not _key_hash(written)]
            if name in known and name not in revoked:
                raise BadRequest(
                    f"tenant {name} exists, and its key is not kept; `outrider tenants revoke {name}` first for a new"
                    " one"
                )
            full = name not in known and len(known) >= MAX_TENANTS  # then those that were revoked are forgotten
            if full and not revoked:
                raise BadRequest(f"there are {MAX_TENANTS} tenants, the most that can be created; revoke one first")
            commands: list[Command] = [("HDEL", record, *revoked) for record in _RECORDS if full]
            commands += [("HSET", keys.TENANTS, name, f"{milliseconds(time)} 0 {hashed}")]
            commands += [("HSET", keys.TENANT_KEYS, hashed, name)]
            commands += [("HSET", keys.TENANT_LIMITS, name, own)] if own is not None else []
            return (milliseconds(time), held if own is None else own), commands

        reads = [("HGETALL", keys.TENANTS), ("HGET", keys.TENANT_LIMITS, name), ("TIME",)]
        created_ms, held = await self._store.change("tenant_create", [keys.TENANTS], reads, decide)
        self._remember()
        log.info("tenant %s was created by an operator", name)
        in_force = pb.TenantLimits(**asdict(quotas.limits_from(held)))
        return pb.Tenant(name=name, created_unix=created_ms / 1000, limits=in_force, use=pb.TenantUse()), key

    async def set_limits(self, name: str, limits: Mapping[str, int], *, afresh: bool) -> pb.Tenant:
        """Set limits of a tenant; with `afresh` the others are the coordinator's again. Raises NotFound."""
        configured = tenant_name(name) in self._configured

        def decide(written: str | None, held: str | None) -> tuple[str | None, list[Command]]:
            if not configured and written is None:
                raise _no_tenant(name)
            own = quotas.written(({} if afresh else quotas.own_limits(held)) | {**limits})
            # The next report of its tokens brings it among the exhausted again, if it has to be there.
            return written, [("HSET", keys.TENANT_LIMITS, name, own), ("ZREM", keys.EXHAUSTED, name)]

        reads = [("HGET", keys.TENANTS, name), ("HGET", keys.TENANT_LIMITS, name)]
        written = await self._store.change("tenant_set", _RECORDS, reads, decide)
        log.info("limits of tenant %s were set by an operator: %s%s", name, dict(limits), " alone" if afresh else "")
        [tenant] = await self._measured(
            [self._tenant(name, written) if written else pb.Tenant(name=name, configured=True)]
        )
        return tenant

    async def revoke(self, name: str) -> pb.Tenant:
        """Revoke a tenant's key if it is valid, and the tickets of the sessions that it opened.

        Raises NotFound, or BadRequest for a tenant of the settings, whose key only they can take away.
        """
        [known] = await self._store.call("tenant", [("HGET", keys.TENANTS, tenant_name(name))])
        if known and (hashed := _key_hash(known)):
            # First, so that a key which is gone is never one whose tickets still serve.
            key_id = api_key_id(bytes.fromhex(hashed))
            await revocations.add(self._store, "api_key_id", key_id, keep_ms=TICKET_MS)

        def decide(written: str | None, time: Any) -> tuple[str | None, list[Command]]:
            if written is None or not (hashed := _key_hash(written)):
                return written, []
            revoked = f"{written.partition(' ')[0]} {milliseconds(time)} "
            return revoked, [("HDEL", keys.TENANT_KEYS, hashed), ("HSET", keys.TENANTS, name, revoked)]

        reads = [("HGET", keys.TENANTS, name), ("TIME",)]
        if written := await self._store.change("tenant_revoke", [keys.TENANTS], reads, decide):
            log.info("tenant %s was revoked by an operator", name)
            return self._tenant(name, written)
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
        known = {name: pb.Tenant(name=name, configured=True) for name in self._configured}
        known |= {name: self._tenant(name, written) for name, written in created.items()}
        found = [known[name] for name in sorted(known) if name > after]
        return await self._measured(found[:limit]), found[limit - 1].name if len(found) > limit else ""

    async def _find(self, hashed: str) -> tuple[str, bool]:
        """Return the tenant whose key has this hash, "" if none has, and whether Redis knows any tenant."""
        commands = [("HGET", keys.TENANT_KEYS, hashed), ("EXISTS", keys.TENANTS)]
        name, any_created = await self._store.call("tenant_of", commands)
        return name or "", bool(any_created)

    async def _measured(self, tenants: Sequence[pb.Tenant]) -> list[pb.Tenant]:
        """Return the tenants with their limits and what they use."""
        found = await quotas.find(self._store, [tenant.name for tenant in tenants])
        for tenant in tenants:
            limits, use = found[tenant.name]
            tenant.MergeFrom(pb.Tenant(limits=pb.TenantLimits(**asdict(limits)), use=use))
        return [*tenants]

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

    def _tenant(self, name: str, written: str) -> pb.Tenant:
        created, revoked, _ = written.split(" ")
        return pb.Tenant(
            name=name,
            created_unix=int(created) / 1000,
            revoked_unix=int(revoked) / 1000,
            configured=name in self._configured,
        )


def _key_hash(written: str) -> str:
    """Return the hash of a tenant's key; "" if it was revoked."""
    return written.rpartition(" ")[2]


def _no_tenant(name: str) -> NotFound:
    return NotFound(f"no tenant {name}; `outrider tenants list` shows them")
