"""Keep the tenants that operators create while the coordinator runs, in Redis, beside those of the settings.

Only the hash of a tenant's key is kept; the key itself is returned once, when it is made. Keys are random, with 256
bits, so neither a plain hash nor the time of a look-up tells anything about one.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection
from dataclasses import dataclass

from coordinator.api.authentication import DEFAULT_TENANT, digest, tenant_name
from coordinator.store import keys
from coordinator.store.redis_store import RedisStore
from outrider.core.errors import BadRequest, NotFound

log = logging.getLogger(__name__)

MAX_TENANTS = 4_096
"""Tenants that operators may create: a list of all is read at once."""
_KEYS = (keys.TENANTS, keys.TENANT_KEYS)


@dataclass(frozen=True)
class Tenant:
    """A tenant, as operators see it: without its key."""

    name: str
    created_unix: float = 0.0
    """Seconds; 0 for a tenant of the settings."""
    revoked_unix: float = 0.0
    """Seconds; 0: its key is valid."""
    configured: bool = False
    """The tenant has a key by the settings, which is removed there."""


class TenantKeys:
    """Keeps the tenants that operators have created. Every method raises Unavailable while Redis is away."""

    def __init__(self, store: RedisStore, configured: Collection[str]) -> None:
        """Keep the `configured` names, which are the settings' tenants."""
        self._store = store
        self._configured = configured

    async def holder(self, hashed: bytes | None) -> tuple[str, bool]:
        """Return the tenant whose key has this hash, "" if none has, and whether any tenant was ever created."""
        name, any_created = await self._store.run("tenant_of", _KEYS, [hashed.hex() if hashed else ""])
        return str(name), bool(any_created)

    async def create(self, name: str) -> tuple[Tenant, str]:
        """Create a tenant, or one anew that was revoked. Return it with its new key. Raises BadRequest."""
        if tenant_name(name) == DEFAULT_TENANT:
            raise BadRequest(f"tenant is {DEFAULT_TENANT}, the tenant of callers without a key; choose another name")
        if name in self._configured:
            raise BadRequest(f"tenant {name} has its key by this coordinator's settings; choose another name")
        key = f"outrider-{secrets.token_urlsafe(32)}"
        made = await self._store.run("tenant_create", _KEYS, [name, digest(key).hex(), MAX_TENANTS])
        if made == "exists":
            raise BadRequest(
                f"tenant {name} exists, and its key is not kept; `outrider tenants revoke {name}` first for a new one"
            )
        if made == "full":
            raise BadRequest(f"there are {MAX_TENANTS} tenants, the most that can be created; revoke one first")
        log.info("tenant %s was created by an operator", name)
        return Tenant(name, int(made) / 1000), key

    async def revoke(self, name: str) -> Tenant:
        """Revoke a tenant's key if it is valid. Raises NotFound, or BadRequest for a tenant of the settings."""
        written = await self._store.run("tenant_revoke", _KEYS, [tenant_name(name)])
        if written:
            log.info("tenant %s was revoked by an operator", name)
            return self._tenant(name, written)
        if name in self._configured:
            raise BadRequest(f"tenant {name} has its key by the coordinator's settings; remove it there and restart")
        raise NotFound(f"no tenant {name}; `outrider tenants list` shows them")

    async def listed(self, after: str, limit: int) -> tuple[list[Tenant], str]:
        """Return a page of the tenants after a name, and the name after which the next page begins; "" at the end."""
        flat = await self._store.run("tenant_list", _KEYS[:1], [])
        known = {name: Tenant(name, configured=True) for name in self._configured}
        known |= {name: self._tenant(name, written) for name, written in zip(flat[::2], flat[1::2], strict=True)}
        found = [known[name] for name in sorted(known) if name > after]
        return found[:limit], found[limit - 1].name if len(found) > limit else ""

    def _tenant(self, name: str, written: str) -> Tenant:
        created, revoked, _ = written.split(" ")
        return Tenant(name, int(created) / 1000, int(revoked) / 1000, name in self._configured)
