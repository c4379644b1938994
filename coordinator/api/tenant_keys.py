"""Tenants that operators create while the coordinator runs: in Redis, beside those of the settings.

Of each there is the hash of its key; the key itself is said once, when it is made.

Keys are random, with 256 bits, so a plain hash tells nothing about one, nor does the time that looking one up takes.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Collection
from dataclasses import dataclass

from coordinator.api.authentication import DEFAULT_TENANT, Holder, digest, tenant_name
from coordinator.store import keys
from coordinator.store.redis_store import Store
from outrider.core.errors import BadRequest, NotFound

log = logging.getLogger(__name__)

MAX_TENANTS = 4_096
"""Created ones: a list of all is read at once."""
_TOUCHED = (keys.TENANTS, keys.TENANT_KEYS)


@dataclass(frozen=True)
class Tenant:
    """As operators see one."""

    name: str
    created_unix: float = 0.0
    """Seconds; 0 for one of the settings."""
    revoked_unix: float = 0.0
    """0: its key is good."""
    configured: bool = False
    """It has a key by the settings, which is removed there."""


class TenantKeys:
    """Shares the store's connections. Every method raises Unavailable while Redis is away."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def holder(self, hashed: bytes | None) -> Holder:
        """Whose key this is the hash of; None: no key was shown."""
        name, keyed = await self._store.run("tenant_of", _TOUCHED, [hashed.hex() if hashed else ""])
        return Holder(name, bool(keyed))

    async def create(self, name: str, configured: Collection[str]) -> tuple[Tenant, str]:
        """A tenant that was not there, or was revoked, and its new key. Raises BadRequest.

        configured: names of the settings' tenants.
        """
        if tenant_name(name) == DEFAULT_TENANT:
            raise BadRequest(f"tenant is {DEFAULT_TENANT}, which is who callers without a key are; choose another name")
        if name in configured:
            raise BadRequest(f"tenant {name} has its key by this coordinator's settings; choose another name")
        key = f"outrider-{secrets.token_urlsafe(32)}"
        made = await self._store.run("tenant_create", _TOUCHED, [name, digest(key).hex(), MAX_TENANTS])
        if made == "exists":
            raise BadRequest(
                f"tenant {name} exists, and its key is not kept; `outrider tenants revoke {name}` first for a new one"
            )
        if made == "full":
            raise BadRequest(f"there are {MAX_TENANTS} tenants, the most that can be created; revoke one first")
        log.info("tenant %s was created by an operator", name)
        return Tenant(name, int(made) / 1000), key

    async def revoke(self, name: str, configured: Collection[str]) -> Tenant:
        """From now on its key opens no session; nothing happens if it was revoked already.

        Raises NotFound, or BadRequest for one of the settings.
        """
        written = await self._store.run("tenant_revoke", _TOUCHED, [tenant_name(name)])
        if written:
            log.info("tenant %s was revoked by an operator", name)
            return _read(name, written, configured)
        if name in configured:
            raise BadRequest(f"tenant {name} has its key by the coordinator's settings; remove it there and restart")
        raise NotFound(f"no tenant {name}; `outrider tenants list` shows them")

    async def listed(self, after: str, limit: int, configured: Collection[str]) -> tuple[list[Tenant], str]:
        """Those after a name, in order; and after whom the next page begins, "" where there is none."""
        flat = await self._store.run("tenant_list", _TOUCHED[:1], [])
        known = {name: Tenant(name, configured=True) for name in configured}
        known |= {name: _read(name, written, configured) for name, written in zip(flat[::2], flat[1::2], strict=True)}
        found = [known[name] for name in sorted(known) if name > after]
        return found[:limit], found[limit - 1].name if len(found) > limit else ""


def _read(name: str, written: str, configured: Collection[str]) -> Tenant:
    created, revoked, _ = written.split(" ")
    return Tenant(name, int(created) / 1000, int(revoked) / 1000, name in configured)
