"""Authenticate callers: devices by their tenant's API key, verifiers by the join token, operators by the admin token.

The file of the tenants' keys also says what verifiers may record of their sessions: nothing, unless it allows that.

All three send `authorization: Bearer <secret>`. Secrets are compared as digests in constant time, and a tenant's key
against every tenant's, so that the time that it takes tells nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import tomllib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from coordinator.config import CoordinatorConfig
from outrider.core.errors import BadRequest, PermissionDenied, Unauthenticated
from outrider.wire.bounds import identifier
from outrider.wire.channels import is_loopback

if TYPE_CHECKING:  # it needs gRPC, for which a command's --help should not wait
    from outrider.wire.admission import Metadata

DEFAULT_TENANT = "default"
"""Tenant of all callers if no key is asked for; no other tenant may have this name."""
MAX_SECRET = 512
MIN_KEY = 16
"""Characters of an API key; shorter ones can be guessed."""
MAX_TENANT = 64
DAY_S = 86_400.0
MAX_KEEP_DAYS = 3_650.0

Lookup = Callable[[bytes | None], Awaitable[tuple[str, bool]]]
"""Hash of a key that no tenant of the settings has (None: none was sent) -> the tenant that was created with it, "" if
there is none, and whether any tenant was ever created: callers need a key then. Raises Unavailable."""


class RecordingPolicy(BaseModel):
    """The extent to which one tenant's sessions may be recorded, as the table [recording.NAME] of a tenants file."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    share: float = Field(ge=0, le=1)
    """Share of the sessions that may be recorded, from 0 to 1."""
    keep_days: float = Field(ge=1e-3, le=MAX_KEEP_DAYS)
    """Longest time that a record is kept."""
    prompts: bool = False
    """Whether prompts are recorded beside what the target produced."""

    def keep_s_of(self, session_id: str) -> float:
        """Return the seconds of a record if the session is drawn by its id, which is random and no caller can choose;
        else 0."""
        digest = hashlib.sha256(f"recording:{session_id}".encode()).digest()
        return self.keep_days * DAY_S if int.from_bytes(digest[:8]) < self.share * 2**64 else 0.0


@dataclass(frozen=True)
class Caller:
    """The tenant of a device that calls."""

    name: str
    api_key_id: str = ""
    """Id of the API key that a device showed; empty if it needed none."""


class Authenticator:
    """Checks callers against the settings' secrets, and the tenants that operators have created."""

    def __init__(self, config: CoordinatorConfig) -> None:
        """Read the keys. Raises BadRequest for a wrong key file and for secrets that the address needs."""
        tenants = {name: secret.get_secret_value() for name, secret in config.tenant_keys.items()}
        file = _read(config.tenants_file) if config.tenants_file is not None else _TenantsFile()
        tenants |= file.tenants
        _check(tenants)
        if unknown := sorted(file.recording.keys() - (tenants or {DEFAULT_TENANT})):
            raise BadRequest(
                f"tenants file: [recording.{unknown[0]}] is for a tenant that has no key; check its name"
                f"{'' if tenants else f', which without keys is {DEFAULT_TENANT}'}",
                field="recording",
            )
        self._recording = file.recording
        self._tenants = {digest(key): tenant for tenant, key in tenants.items()}
        self._join = config.join_token.get_secret_value() if config.join_token else ""
        self._admin = config.admin_token.get_secret_value() if config.admin_token else ""
        self._trusting = config.insecure or is_loopback(config.listen)
        """Callers need no secret that is not set."""
        self.lookup: Lookup | None = None
        """Finds the tenants that operators have created; None if there are none."""
        if not self._trusting:
            what = "API keys for tenants, or an admin token to create some with"
            _demand(tenants or self._admin, what, "--tenants FILE or OUTRIDER_COORDINATOR_ADMIN_TOKEN")
            _demand(self._join, "a join token for verifiers", "OUTRIDER_COORDINATOR_JOIN_TOKEN")

    @property
    def configured(self) -> Mapping[str, str]:
        """Return the tenants that have a key by the settings, each with the id of its key."""
        return {tenant: api_key_id(hashed) for hashed, tenant in self._tenants.items()}

    @property
    def anonymous(self) -> bool:
        """Return whether callers need no key until a tenant is created."""
        return self._trusting and not self._tenants

    async def admits_anybody(self) -> bool:
        """Return whether callers need no key, so that all are one tenant. Raises Unavailable."""
        return self.anonymous and not (self.lookup is not None and (await self.lookup(None))[1])

    async def tenant(self, metadata: Metadata) -> Caller:
        """Return the caller. Raises Unauthenticated or Unavailable."""
        secret = _secret(metadata)
        hashed = digest(secret) if secret else None
        if hashed is not None:
            found = [tenant for known, tenant in self._tenants.items() if hmac.compare_digest(known, hashed)]
            if found:
                return Caller(found[0], api_key_id(hashed))
        created, keys_needed = await self.lookup(hashed) if self.lookup else ("", False)
        if hashed is not None and created:
            return Caller(created, api_key_id(hashed))
        if not keys_needed and self.anonymous:
            return Caller(DEFAULT_TENANT)
        if hashed is None:
            raise _missing("an API key")
        raise Unauthenticated("the API key is unknown here; ask the operator for one of your tenant's")

    def recording(self, tenant: str) -> RecordingPolicy:
        """Return what may be recorded of a tenant's sessions: nothing, unless somebody said so."""
        return self._recording.get(tenant, RecordingPolicy(share=0.0, keep_days=1.0))

    def check_verifier(self, metadata: Metadata) -> None:
        """Raise Unauthenticated unless the caller may act as a verifier."""
        if self._join:
            _compare(self._join, metadata, "join token")

    def check_operator(self, metadata: Metadata) -> None:
        """Raise Unauthenticated or PermissionDenied unless the caller may administer."""
        if self._admin:
            _compare(self._admin, metadata, "admin token")
        elif not self._trusting:
            raise PermissionDenied(
                "Admin is off: no admin token is set; set OUTRIDER_COORDINATOR_ADMIN_TOKEN and restart"
            )


def tenant_name(name: str, field: str = "tenant") -> str:
    """Return a valid name of a tenant. Raises BadRequest for any other."""
    return identifier(field, name, MAX_TENANT)


def digest(secret: str) -> bytes:
    """Return the hash by which a secret is compared and kept."""
    return hashlib.sha256(secret.encode()).digest()


def api_key_id(hashed: bytes) -> str:
    """Return the id of an API key with this hash, which tells nothing of the key."""
    return hashed.hex()[:16]


def _secret(metadata: Metadata) -> str:
    """Return the caller's secret, or an empty string."""
    for name, value in metadata:
        if name == "authorization" and isinstance(value, str):
            scheme, _, secret = value.partition(" ")
            if scheme.lower() == "bearer" and 0 < len(secret) <= MAX_SECRET:
                return secret
    return ""


def _missing(what: str) -> Unauthenticated:
    return Unauthenticated(f"{what} is missing; send the metadata `authorization: Bearer ...`")


def _compare(known: str, metadata: Metadata, what: str) -> None:
    secret = _secret(metadata)
    if not secret:
        raise _missing(f"the {what}")
    if not hmac.compare_digest(digest(known), digest(secret)):
        raise Unauthenticated(f"the {what} is wrong; compare it with the coordinator's")


def _demand(given: object, what: str, how: str) -> None:
    if not given:
        raise BadRequest(
            f"listening beyond loopback needs {what}; give them with {how}, or pass --insecure to trust every"
            " caller who can connect"
        )


class _TenantsFile(BaseModel, extra="forbid"):
    tenants: dict[str, str] = {}
    recording: dict[str, RecordingPolicy] = {}


def _read(path: Path) -> _TenantsFile:
    """Return the parsed file. Raises BadRequest, which shows no key."""
    try:
        return _TenantsFile.model_validate(tomllib.loads(path.read_text()))
    except OSError as error:
        raise BadRequest(f"tenants file {path} cannot be read: {error.strerror}", field="tenants") from error
    except ValidationError as error:
        [first, *_] = error.errors(include_url=False, include_input=False)
        where = ".".join(map(str, first["loc"]))
        raise BadRequest(
            f'tenants file {path}: {where}: {first["msg"]}; it has a table [tenants] of name = "key", and may have'
            " tables [recording.NAME] of share, keep_days and, if need be, prompts",
            field="tenants",
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadRequest(f"tenants file {path} is no TOML: {error}", field="tenants") from error


def _check(tenants: Mapping[str, str]) -> None:
    for name, key in tenants.items():
        identifier("tenants: a name", name, MAX_TENANT)
        if not MIN_KEY <= len(key) <= MAX_SECRET:
            raise BadRequest.bound(f"tenants: length of {name}'s key", len(key), f"between {MIN_KEY} and {MAX_SECRET}")
    if len(set(tenants.values())) < len(tenants):
        raise BadRequest("tenants: two tenants have the same key; give each its own", field="tenants")
