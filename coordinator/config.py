"""Define the coordinator's settings, which are built once where the process starts.

Flags override the environment (OUTRIDER_COORDINATOR_<FIELD>), which overrides the table [coordinator] of a file
(`outrider.settings`), which overrides the defaults.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from outrider.core.addresses import DEFAULT_COORDINATOR, DEFAULT_STATE_DIR
from outrider.core.protocol.messages import SessionLimits
from outrider.settings import Address, Flag, Token
from outrider.wire.channels import ServerTls

CLOCKS_DIFFER_S = 3_600.0
"""Seconds by which clocks of Redis, coordinators and verifiers may differ: records are kept this much longer."""
TICKET_TTL_S = 3_600.0
"""Seconds for which a ticket lets a device attach to a verifier. Nothing else needs a valid ticket, so this bounds the
use of a stolen one."""
RESUME_GRACE_S = 86_400.0
"""Seconds after its expiry for which a ticket still proves ownership of a session, to have it placed again: a stream
may outlive its ticket."""
TICKET_MS = int(1000 * (TICKET_TTL_S + CLOCKS_DIFFER_S))
"""Milliseconds after which no ticket made until now lets a device attach, with clocks not alike."""
SESSION_MS = int(1000 * (TICKET_TTL_S + RESUME_GRACE_S))
"""Milliseconds that a session's record is kept: as long as one of its tickets proves ownership."""
LEASE_MS = 5_000
"""Shortest lease of a verifier."""
LIMITS = SessionLimits()
"""Limits of every session; windows stay below."""
EMBEDDED = "embedded"
"""The value of `redis` that starts a Redis-compatible server as a child process."""


class CanaryRule(BaseModel, frozen=True, extra="forbid"):
    """Says how devices try a release before all get it."""

    share: float = Field(default=0.25, gt=0, lt=1)
    """Share of the devices: a larger one decides sooner, and harms more if the release is bad."""
    window_s: float = Field(default=3_600.0, gt=0, le=2_592_000)
    tenants: int = Field(default=3, ge=1, le=64)


class CoordinatorConfig(BaseSettings):
    """Settings of the coordinator. Times end in _ms or _s, their unit; the strings below fields are user docs."""

    model_config = SettingsConfigDict(
        env_prefix="OUTRIDER_COORDINATOR_",
        env_nested_delimiter="_",
        env_nested_max_split=1,
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
    )

    listen: Address = DEFAULT_COORDINATOR
    """HOST:PORT at which devices, verifiers and operators connect; port 0 takes any free one. Loopback by default, so
    that nothing is open by accident."""
    redis: str = EMBEDDED
    """A redis://, rediss:// or unix:// URL, its password encoded (%2F for a slash); `embedded` starts a server that
    forgets everything at the end."""
    state_dir: Path = Path(DEFAULT_STATE_DIR)
    """Folder of the ticket key, of tokens that `outrider up` makes, and of a copy of the draft releases with their
    history."""
    ticket_key: Path | None = None
    """PEM file of the Ed25519 key that signs tickets, the same for all coordinators over one Redis. Behind it may stand
    the key that is to replace it or that it replaces, whose tickets are taken, too. If not set, `ticket-key.pem` in
    `state_dir`, which a coordinator makes."""
    tls_cert: Path | None = None
    """PEM chain; with `tls_key` it turns TLS on."""
    tls_key: Path | None = None
    """PEM private key of `tls_cert`."""
    tls_client_ca: Path | None = None
    """PEM authorities that must have signed the certificate of every caller, of gRPC and of drafts over HTTP. Without
    them callers need no certificate."""
    insecure: bool = False
    """Accept plain text and anonymous callers beyond this machine."""

    tenants_file: Annotated[Path | None, Flag("--tenants")] = None
    """TOML file of API keys, `[tenants]` with `name = "key"`, and of what may be recorded, `[recording.NAME]`. Without
    any key on loopback, or with `insecure`, every caller is tenant "default" until `outrider tenants create` makes the
    first tenant."""
    tenant_keys: dict[str, SecretStr] = Field(default_factory=dict)
    """The same without a file, {"name": "key"}; in the environment as JSON. Adds to `tenants_file`."""
    join_token: Token | None = None
    """Secret that a verifier must send to register: a registered verifier receives devices' prompts."""
    admin_token: Token | None = None
    """Secret that an operator must send. Without it Admin answers on loopback only; with it a coordinator beyond
    loopback may start without tenants, since operators can create them."""

    report_interval_ms: int = Field(1_000, ge=20, le=60_000)
    """Milliseconds between two reports of a verifier: fresh enough for placement, one Redis round trip each. Five lost
    reports end a verifier's lease, but not before five seconds."""

    window_control: bool = True
    """Decide each session's speculation window by what verifiers measure; if false, each verifier's setting stands."""

    artifacts: Path | None = None
    """Folder of draft files, each named by its hash; devices fetch them over HTTP."""
    http: Address = ""
    """HOST:PORT at which `artifacts` is served, with `tls_cert` if it is set; port 0 takes any free one."""
    artifacts_url: str = ""
    """URL that devices put before `artifacts/HASH.gguf`, if a proxy or another name stands before `http`."""
    release_keys: str = ""
    """Publishers whose releases are accepted: hex of raw public keys, or files of them, separated by commas. Empty
    accepts every publisher with the admin token; devices decide for themselves which keys they trust."""
    canary: CanaryRule = CanaryRule()
    """How devices try a release, as JSON: `share` of them (0.25); `window_s`, seconds until one that is undecided is
    rolled back (3600); and `tenants` that must take part before a trial decides by itself, since any one may lie (3).
    With fewer you promote or roll back; 1 trusts every tenant. Without tenants it is 1."""

    metrics: str = ""
    """HOST:PORT, or a port on loopback, at which /metrics and /healthz are served over plain HTTP; empty serves none.
    They show load and speeds, and name no session and no tenant."""

    @model_validator(mode="after")
    def _consistent(self) -> CoordinatorConfig:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together: give both or neither")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca needs tls_cert and tls_key: clients show certificates over TLS alone")
        if (self.artifacts is None) != (not self.http):
            raise ValueError("artifacts and http go together: the folder of drafts and where it is served")
        return self

    @property
    def tls(self) -> ServerTls | None:
        """Return certificate and key for `channels.bind`; None without TLS."""
        return ServerTls(self.tls_cert, self.tls_key, self.tls_client_ca) if self.tls_cert and self.tls_key else None

    @property
    def lease_ms(self) -> int:
        """Return the milliseconds without a report after which a verifier gets no more sessions."""
        return max(LEASE_MS, 5 * self.report_interval_ms)
