"""What the coordinator's parts say to one another. Plain data; `codec` makes it from protobuf and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider.core.telemetry import SessionTelemetry, VerifierTelemetry
from outrider.wire.ticket import Target


@dataclass(frozen=True)
class Registration:
    """A verifier that offers itself."""

    verifier_id: str
    address: str
    tls: bool
    target: Target
    capacity: int
    """Sessions that it serves at once."""
    instance: int
    """Random per process start."""


@dataclass(frozen=True)
class WorkloadKey:
    """What makes sessions alike, as far as anybody can tell beforehand."""

    tenant: str
    draft: str
    """Release of the device's draft."""
    traffic: str
    """The application's label, or empty."""
    weights: str
    """Hash of the target's."""


@dataclass(frozen=True)
class Prior:
    """What verifiers lately measured of the sessions with one workload key."""

    acceptance_history: bytes = b""
    """Outcomes of their devices' proposals, in the order of the reports (outrider.core.acceptance.history)."""
    draft_ms: float = 0.0
    """Usual time for one level of a device's tree; 0 if not known."""
    nodes_per_level: float = 0.0
    """Usual nodes of a level; 0 if not known."""


MAX_LEVELS = 4_096
"""Levels of a window's bounds: no session's limits are wider."""
MAX_DRAFT_WAIT_MS = 60_000.0
"""Draft wait of a pinned window."""
MAX_PER_LEVEL = 16.0
"""Nodes per level of a pinned window."""


@dataclass(frozen=True)
class Window:
    """How far a session speculates. A level is the proposal for one position, with its siblings."""

    k: int = 0
    """Speculation length: levels that one step verifies, at most; 0 is plain streaming."""
    depth: int = 0
    """Window depth: levels that the device drafts ahead of the last token that it knows, at most."""
    draft_wait_ms: float | None = None
    """How long the verifier waits for nodes before a plain step. None leaves it to the coordinator; it counts as 0."""
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
    """Commits that a node must bring to pay for its time."""
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
    """Levels that the verifier may evaluate in a step where it finds them worth it; window.k was counted on."""
    verifier_id: str = ""
    """Verifier of the session; filled in by the store."""


VERIFIER_STATES = ("serving", "cordoned", "draining")


@dataclass(frozen=True)
class VerifierStatus:
    """A registered verifier with a valid lease."""

    registration: Registration
    telemetry: VerifierTelemetry
    lease_s: float
    """Until the lease ends unless it is renewed."""
    cordoned: bool = False
    """An operator lets no new sessions be placed there."""

    @property
    def state(self) -> str:
        """One of VERIFIER_STATES; new sessions are placed on those that serve alone."""
        return "draining" if self.telemetry.draining else "cordoned" if self.cordoned else "serving"


@dataclass(frozen=True)
class SessionStatus:
    """A session that holds a place."""

    telemetry: SessionTelemetry
    """As last reported, without the acceptance history; its counts are 0 before the first report."""
    verifier_id: str
    standby: str
    """Verifier that the device goes to if this one fails; empty if there is none."""
    reported: bool
    """False: the session is placed, and no verifier has reported it yet."""


@dataclass(frozen=True)
class ReportContext:
    """What a report finds in the store."""

    kinds: Mapping[str, WorkloadKey]
    """By session id, of those that have one."""
    killed: tuple[str, ...] = ()
    """Sessions among those reported that an operator has ended."""
    drain: bool = False
    """An operator wants the instance that reports to drain."""


@dataclass(frozen=True)
class ReportReply:
    """What a verifier is told in answer to its report; `killed` and `drain` as in Heard."""

    windows: tuple[WindowDecision, ...] = ()
    killed: tuple[str, ...] = ()
    drain: bool = False


@dataclass(frozen=True)
class PlacementRequest:
    """What a session asks of the verifier that is to serve it."""

    target: str
    """Name; empty where the cluster serves just one. With `weights` given it is for messages only."""
    rtt_ms: Mapping[str, float] = field(default_factory=dict)
    """Verifier id -> measured round trip, where the device knows one."""
    weights: tuple[str, str] | None = None
    """Weights and tokenizer hash that the session is bound to; None binds it to those of the verifier chosen."""
    numerics_class: str = ""
    """Preferred; empty has no preference."""
    failed: frozenset[str] = frozenset()
    """Verifiers to avoid while any other has room."""
    draft: str = ""
    """Release of the device's draft; empty where it has none."""
    traffic: str = ""
    """The application's label for what is asked."""


@dataclass(frozen=True)
class Candidate:
    """A verifier that may be asked to take the session, in the order of the random draw."""

    verifier_id: str
    rtt_ms: float
    failed: bool


@dataclass(frozen=True)
class Seat:
    """Where a session was put."""

    verifier_id: str
    address: str
    tls: bool
    target: Target


@dataclass(frozen=True)
class Placed:
    """An atomic placement: a seat taken, a standby named, two ranges of epochs used up."""

    epoch: int
    """First of the primary's range; the standby's follows it directly."""
    primary: Seat
    standby: Seat | None


@dataclass(frozen=True)
class Grant:
    """A seat with the ticket for it."""

    seat: Seat
    ticket: bytes
    epoch_first: int
    epoch_last: int


@dataclass(frozen=True)
class Opening:
    """The answer to an open or a resume."""

    session_id: str
    target: Target
    primary: Grant
    standby: Grant | None
    expires_unix: float
    prior: Prior = field(default_factory=Prior)


@dataclass(frozen=True)
class ResumeOrder:
    """What a device that lost its verifier says."""

    session_id: str
    ticket: bytes
    failed: frozenset[str] = frozenset()
    last_epoch: int = 0
    rtt_ms: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Membership:
    """What a registered verifier needs to know."""

    lease_ms: int
    report_interval_ms: int
    public_keys: Mapping[str, bytes]


@dataclass(frozen=True)
class Windows:
    """Everything that `window show` shows."""

    decided: tuple[WindowDecision, ...]
    bounds: Mapping[str, WindowBounds]
    """By session id; those of "" are for all others."""
    total: int = 0
    """Of the decisions, those that are left out included."""


@dataclass(frozen=True)
class Fleet:
    """Everything that `status` shows."""

    verifiers: tuple[VerifierStatus, ...]
    sessions: tuple[SessionStatus, ...]
    store: str
    uptime_s: float
    total_verifiers: int
    """Those that are left out included, as in the next."""
    total_sessions: int
