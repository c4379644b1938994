"""Define the values that the coordinator's handlers, stores and window control exchange; codecs convert them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from outrider.core.telemetry import SessionTelemetry, VerifierTelemetry
from outrider.wire.ticket import Target

MAX_LEVELS = 4_096
"""Levels of a window's bounds: no session's limits are wider."""
MAX_DRAFT_WAIT_MS = 60_000.0
"""Draft wait of a pinned window."""
MAX_PER_LEVEL = 16.0
"""Nodes per level of a pinned window."""
VERIFIER_STATES = ("serving", "cordoned", "draining")


@dataclass(frozen=True)
class VerifierRegistration:
    """A verifier that registers, and how to reach it."""

    verifier_id: str
    address: str
    """HOST:PORT."""
    tls: bool
    target: Target
    capacity: int
    """Sessions that it serves at once."""
    instance: int
    """Random per process start."""


@dataclass(frozen=True)
class VerifierStatus:
    """A registered verifier that has a valid lease."""

    registration: VerifierRegistration
    telemetry: VerifierTelemetry
    lease_s: float
    """Seconds until the lease ends unless it is renewed."""
    cordoned: bool = False
    """An operator lets no new sessions be placed on the verifier."""

    @property
    def state(self) -> str:
        """Return one of VERIFIER_STATES; new sessions are placed on serving verifiers alone."""
        return "draining" if self.telemetry.draining else "cordoned" if self.cordoned else "serving"


@dataclass(frozen=True)
class SessionStatus:
    """A session that holds a place on a verifier."""

    telemetry: SessionTelemetry
    """Telemetry as last reported, without the acceptance history; its counts are 0 before the first report."""
    verifier_id: str
    standby: str
    """Verifier that the device goes to if this one fails; empty if there is none."""
    reported: bool
    """False: the session is placed, and no verifier has reported it yet."""


@dataclass(frozen=True)
class WorkloadKey:
    """The properties shared by sessions whose drafts are expected to be accepted alike."""

    tenant: str
    draft: str
    """Release of the device's draft."""
    traffic: str
    """Traffic class; may be empty."""
    weights: str
    """Hash of the target's weights."""


@dataclass(frozen=True)
class Prior:
    """Holds the recent measurements of sessions with one workload key."""

    acceptance_history: bytes = b""
    """Outcomes of their devices' proposals, in the order of the reports (outrider.core.acceptance.history)."""
    draft_ms: float = 0.0
    """Usual time for one level of a device's tree; 0 if not known."""
    nodes_per_level: float = 0.0
    """Usual nodes of a level; 0 if not known."""


@dataclass(frozen=True)
class Window:
    """The extent to which a session speculates. A level is the proposal for one position, with its siblings."""

    k: int = 0
    """Speculation length: levels that one step verifies, at most; 0 is plain streaming."""
    depth: int = 0
    """Window depth: levels that the device drafts ahead of the last token that it knows, at most."""
    draft_wait_ms: float | None = None
    """Time that the verifier waits for nodes before a plain step. None leaves it to the coordinator; it counts as 0."""
    nodes_per_level: float | None = None
    """The first proposal of a level and its siblings. None leaves it to the coordinator; it counts as 1."""


@dataclass(frozen=True)
class WindowBounds:
    """The widest window that an operator allows a session, or all sessions that have no bounds of their own."""

    window: Window
    pinned: bool = False
    """The session has exactly this window, whatever the measurements say."""


@dataclass(frozen=True)
class WindowDecision:
    """The window that was decided for a session, what it was decided from and what is predicted of it."""

    session_id: str
    epoch: int
    window: Window
    min_acceptance: float
    """Commits that a node must bring to pay for its time, 0 to 1."""
    speedup: float
    """Predicted, over plain streaming."""
    tokens_per_step: float
    """Predicted."""
    reason: str
    rtt_ms: float
    draft_ms: float
    observations: int
    """Positions of the acceptance history that the decision was made from."""
    first_acceptance: float
    """Share of these positions whose first proposal was accepted."""
    max_k: int = 0
    """Levels that the verifier may evaluate in a step where that pays; window.k is what was counted on."""
    step_ms: float = 0.0
    """Predicted length of the verifier's steps; 0 if not known."""
    verifier_id: str = ""
    """Verifier of the session; filled in by the store."""


@dataclass(frozen=True)
class Revocation:
    """An order that ends tickets before their time."""

    kind: Literal["session", "api_key"]
    """What the tickets have in common: their session, or the API key that opened it."""
    name: str
    """Its id."""
    until_unix: float = 0.0
    """Seconds; every ticket that it ends has expired by then."""

    @property
    def written(self) -> str:
        """Return it as the store keeps it."""
        return f"{self.kind}:{self.name}"


@dataclass(frozen=True)
class ReportReply:
    """The facts that a verifier's report finds in the store."""

    workloads: Mapping[str, WorkloadKey]
    """Workload keys by session id, of the reported sessions that have one."""
    closed: tuple[str, ...] = ()
    """Reported sessions that their devices have closed."""
    revoked: tuple[Revocation, ...] = ()
    """Revocations that the verifier has not seen, the oldest first, as many as an answer holds."""
    seen: int = 0
    """The number by which it names the last of them."""
    drain: bool = False
    """An operator wants the reporting instance to drain."""
    store_unix: float = 0.0
    """The time in seconds by the store's clock."""
    contended: bool = False
    """Tenants wait for a place at the verifier's target."""
    exhausted: tuple[str, ...] = ()
    """Tenants that may open no session since their tokens are used up."""
    devices: Mapping[str, str] = field(default_factory=dict)
    """`device_id` of PlacementRequest by session id, of the reported sessions that were placed here."""
    bounds: Mapping[str, WindowBounds] = field(default_factory=dict)
    """Bounds of windows that operators have set, by session id; those of "" are for all others."""
    weights: str = ""
    """Weights hash of the verifier's target."""


@dataclass(frozen=True)
class PlacementRequest:
    """The requirements of a session on the verifier that is to serve it."""

    target: str = ""
    """Name of the target; empty if the cluster serves just one. If `weights` is given, it is for messages only."""
    weights: tuple[str, str] | None = None
    """Weights and tokenizer hash that the session is bound to; None binds it to those of the verifier chosen."""
    failed: frozenset[str] = frozenset()
    """Verifiers to avoid while any other has room."""
    draft: str = ""
    """Release of the device's draft; empty if it has none."""
    traffic: str = ""
    """Traffic class; may be empty."""
    prompt_tokens: int = 0
    """Tokens of the prompt; 0 if the session will generate nothing."""
    device_id: str = ""
    """Id by which the device is drawn for trials of drafts, as it says itself; empty if it has none."""


@dataclass(frozen=True)
class Grant:
    """A verifier that a device may attach to, with the ticket for it."""

    verifier: VerifierRegistration
    ticket: bytes
    epoch_first: int
    epoch_last: int


@dataclass(frozen=True)
class OpenedSession:
    """The answer to a device that opens or resumes a session."""

    session_id: str
    primary: Grant
    standby: Grant | None
    expires_unix: float
    """When the tickets expire, in seconds."""
    prior: Prior = field(default_factory=Prior)
