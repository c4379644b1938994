"""Who is calling: devices by their tenant's API key, verifiers by the join token, operators by the admin token.

All three send `authorization: Bearer <secret>`. Secrets are compared as digests in constant time, and a tenant's key
against every tenant's, so that time tells nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coordinator.api.recording_policy import DAY_S, RecordingPolicy, policies
from coordinator.config import CoordinatorConfig
from outrider.core.errors import BadRequest, PermissionDenied, Unauthenticated
from outrider.wire.channels import is_loopback

DEFAULT_TENANT = "default"
"""Who everybody is where no key is asked for; so nobody else can be."""
MAX_SECRET = 512
MIN_KEY = 16
"""Characters of an API key; shorter ones can be guessed."""
_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")

Metadata = Iterable[tuple[str, str | bytes]]


@dataclass(frozen=True)
class Holder:
    """Of a key that was shown, among the tenants that operators have created."""

    tenant: str = ""
    """Empty where the key is nobody's."""
    keyed: bool = False
    """Whether any tenant was ever created: callers need a key then."""


Lookup = Callable[[bytes | None], Awaitable[Holder]]
"""Hash of a key that no tenant of the settings has (None: none was shown) -> whose it is. Raises Unavailable."""


async def nobody_else(hashed: bytes | None) -> Holder:
    """Where no tenants are created."""
    return Holder()


class Access:
    """What the coordinator was told about its callers."""

    def __init__(
        self,
        tenants: Mapping[str, str],
        join_token: str,
        admin_token: str,
        *,
        open_house: bool,
        recording: Mapping[str, RecordingPolicy] | None = None,
        lookup: Lookup = nobody_else,
    ) -> None:
        """`open_house`: whoever can connect is trusted where no secret is set (loopback, or --insecure).

        recording: by tenant; nothing is recorded of those that are left out.
        """
        self._tenants = {digest(key): tenant for tenant, key in tenants.items()}
        self._join = join_token
        self._admin = admin_token
        self._open_house = open_house
        self._recording = dict(recording or {})
        self._lookup = lookup

    @classmethod
    def from_config(cls, config: CoordinatorConfig, lookup: Lookup = nobody_else) -> Access:
        """Raises BadRequest for a key file that is wrong, or for an address where secrets are needed and missing."""
        tenants = {name: secret.get_secret_value() for name, secret in config.tenant_keys.items()}
        file = _read(config.tenants_file) if config.tenants_file is not None else {}
        tenants |= file.get("tenants", {})
        _check(tenants)
        recording = _recording(config, tenants, file.get("recording", {}))
        join = config.join_token.get_secret_value() if config.join_token else ""
        admin = config.admin_token.get_secret_value() if config.admin_token else ""
        open_house = config.insecure or is_loopback(config.listen)
        if not open_house:
            _demand(
                tenants or admin,
                "API keys for tenants, or an admin token to create some with",
                "--tenants FILE or OUTRIDER_COORDINATOR_ADMIN_TOKEN",
            )
            _demand(join, "a join token for verifiers", "OUTRIDER_COORDINATOR_JOIN_TOKEN")
        return cls(tenants, join, admin, open_house=open_house, recording=recording, lookup=lookup)

    @property
    def configured(self) -> frozenset[str]:
        """Names of the tenants that have a key by the settings."""
        return frozenset(self._tenants.values())

    async def tenant(self, metadata: Metadata) -> str:
        """The caller's tenant. Raises Unauthenticated or Unavailable."""
        secret = _shown(metadata)
        shown = digest(secret) if secret else None
        if shown is not None:
            found = [tenant for known, tenant in self._tenants.items() if hmac.compare_digest(known, shown)]
            if found:
                return found[0]
        holder = await self._lookup(shown)
        if holder.tenant:
            return holder.tenant
        if not holder.keyed and self.anonymous:
            return DEFAULT_TENANT
        if shown is None:
            raise _missing("an API key")
        raise Unauthenticated("the API key is unknown here; ask the operator for one of your tenant's")

    @property
    def anonymous(self) -> bool:
        """Whether callers need no key until a tenant is created."""
        return self._open_house and not self._tenants

    def recording(self, tenant: str) -> RecordingPolicy:
        """What may be recorded of a tenant's sessions."""
        return self._recording.get(tenant, RecordingPolicy())

    def verifier(self, metadata: Metadata) -> None:
        """Raises Unauthenticated unless the caller may act as a verifier."""
        if self._join:
            _compare(self._join, _bearer(metadata, "the join token"), "join token")

    def operator(self, metadata: Metadata) -> None:
        """Raises Unauthenticated or PermissionDenied unless the caller may administer."""
        if self._admin:
            _compare(self._admin, _bearer(metadata, "the admin token"), "admin token")
        elif not self._open_house:
            raise PermissionDenied(
                "Admin is off: no admin token is set; set OUTRIDER_COORDINATOR_ADMIN_TOKEN and restart"
            )


def tenant_name(name: str) -> str:
    """Raises BadRequest for one that may not be."""
    if not _TENANT.fullmatch(name):
        raise BadRequest.bound("tenant", repr(name[:64]), "1 to 64 letters, digits, '.', '_' or '-'")
    return name


def digest(secret: str) -> bytes:
    """By which a secret is compared and kept."""
    return hashlib.sha256(secret.encode()).digest()


def _bearer(metadata: Metadata, what: str) -> str:
    secret = _shown(metadata)
    if not secret:
        raise _missing(what)
    return secret


def _shown(metadata: Metadata) -> str:
    """The caller's secret, or empty."""
    for name, value in metadata:
        if name == "authorization" and isinstance(value, str):
            scheme, _, secret = value.partition(" ")
            if scheme.lower() == "bearer" and 0 < len(secret) <= MAX_SECRET:
                return secret
    return ""


def _missing(what: str) -> Unauthenticated:
    return Unauthenticated(f"{what} is missing; send the metadata `authorization: Bearer ...`")


def _compare(known: str, shown: str, what: str) -> None:
    if not hmac.compare_digest(digest(known), digest(shown)):
        raise Unauthenticated(f"the {what} is wrong; compare it with the coordinator's")


def _demand(given: object, what: str, how: str) -> None:
    if not given:
        raise BadRequest(
            f"listening beyond loopback needs {what}; give them with {how}, or pass --insecure to trust everybody who"
            " can connect"
        )


def _read(path: Path) -> dict[str, Any]:
    """The whole file; its `tenants` are names and keys."""
    try:
        file = tomllib.loads(path.read_text())
    except OSError as error:
        raise BadRequest(f"tenants file {path} cannot be read: {error.strerror}", field="tenants") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"tenants file {path} is no TOML: {error}", field="tenants") from error
    table = file.get("tenants")
    if not isinstance(table, dict) or not all(isinstance(key, str) for key in table.values()):
        raise BadRequest(f'tenants file {path} must have a table [tenants] of name = "key"', field="tenants")
    return file


def _recording(config: CoordinatorConfig, tenants: Mapping[str, str], tables: Any) -> dict[str, RecordingPolicy]:
    if not tenants:
        keep_s = config.recording_keep_days * DAY_S
        return {DEFAULT_TENANT: RecordingPolicy(config.recording_share, keep_s, config.recording_prompts)}
    if config.recording_share > 0 or config.recording_prompts:
        raise BadRequest(
            "recording_share and recording_prompts are for a cluster without tenants; with tenants each has its own in"
            " the tenants file: [recording.NAME] share = 0.1  keep_days = 30",
            field="recording_share",
        )
    return policies(tables, tenants, "tenants file")


def _check(tenants: Mapping[str, str]) -> None:
    for name, key in tenants.items():
        if not _TENANT.fullmatch(name):
            raise BadRequest.bound("tenants: a name", repr(name), "1 to 64 letters, digits, '.', '_' or '-'")
        if not MIN_KEY <= len(key) <= MAX_SECRET:
            raise BadRequest.bound(f"tenants: length of {name}'s key", len(key), f"between {MIN_KEY} and {MAX_SECRET}")
    if len(set(tenants.values())) < len(tenants):
        raise BadRequest("tenants: two tenants have the same key; give each its own", field="tenants")
