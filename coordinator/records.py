"""What the coordinator's parts say to one another. Plain data; `codec` makes it from protobuf and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
class SessionStats:
    """One live session, as its verifier counts it."""

    session_id: str
    tenant: str
    verifier_id: str
    epoch: int = 0
    steps: int = 0
    committed: int = 0
    evaluated: int = 0
    accepted: int = 0
    rtt_ms: float = 0.0
    verdicts: bytes = b""
    """On its device's guesses for the last positions (outrider.core.acceptance.history), oldest first."""
    draft_ms: float = 0.0
    """Of its device for one level of its tree; 0 where it has not shown."""
    nodes_per_level: float = 0.0
    """A level's guess and its siblings; 0 where it has not shown."""
    draft: str = ""
    """Release that its device says it drafts with; empty where it does not, or its verifier does not tell."""
    traffic: str = ""
    """Class, by its ticket."""
    positions: int = 0
    """Since the first guess with this release was judged, those without a guess among them; of them the next."""
    right: int = 0
    """Whose first guess was right."""


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
    """What verifiers lately saw of a kind of sessions."""

    verdicts: bytes = b""
    """On their devices' guesses, in the order of the reports."""
    draft_ms: float = 0.0
    """The usual one; 0 where none has shown, as is the next."""
    nodes_per_level: float = 0.0


@dataclass(frozen=True)
class SessionWindow:
    """How far a session speculates, with what that was decided from."""

    session_id: str
    verifier_id: str
    epoch: int
    k: int
    """Levels that one step verifies, as was counted on."""
    most: int
    """That it may verify."""
    depth: int
    """Levels that its device drafts ahead."""
    draft_wait_ms: float
    nodes_per_level: float
    min_acceptance: float
    speedup: float
    """Predicted, over streaming."""
    tokens_per_step: float
    """Predicted."""
    reason: str
    rtt_ms: float
    draft_ms: float
    verdicts: int
    """How many there were to judge by."""
    hits: float
    """Share of first guesses that were right."""


MAX_LEVELS = 4_096
"""Of a window's bounds: no session's limits are wider."""


MAX_DRAFT_WAIT_MS = 60_000.0
"""Of a pinned window."""
MAX_PER_LEVEL = 16.0
"""Nodes per level of a pinned window."""


@dataclass(frozen=True)
class WindowBounds:
    """What an operator allows a session, or all that have no bounds of their own."""

    k: int
    depth: int
    pinned: bool = False
    """These, whatever the measurements say."""
    draft_wait_ms: float | None = None
    """Of a pinned window; None leaves it to the coordinator, as is the next."""
    nodes_per_level: float | None = None


@dataclass(frozen=True)
class Load:
    """A verifier's second."""

    live_sessions: int = 0
    step_ms: float = 0.0
    kv_used: int = 0
    kv_capacity: int = 0
    tokens_per_s: float = 0.0
    draining: bool = False
    node_ms: float = 0.0
    """What a node adds to a step."""
    timing_ms: Mapping[str, float] = field(default_factory=dict)
    """The parts of a step."""
    step_cost_ms: Mapping[int, float] = field(default_factory=dict)
    """The cost model: rows of one session -> milliseconds of a step."""
    session_cost_ms: float = 0.0
    """And of each further session, beside its rows."""
    min_acceptance: float = 0.0
    """What a node must be worth to be evaluated now, 0 to 1."""
    evaluated: int = 0
    """Nodes, of the live sessions since they began there; as is the next."""
    accepted: int = 0
    rtt_ms: float = 0.0
    """The median of its sessions; 0 where none is measured."""


VERIFIER_STATES = ("serving", "cordoned", "draining")


@dataclass(frozen=True)
class Verifier:
    """A registered verifier with a valid lease."""

    registration: Registration
    load: Load
    lease_s: float
    """Until the lease ends unless it is renewed."""
    cordoned: bool = False
    """An operator lets no new sessions be placed there."""

    @property
    def state(self) -> str:
        """One of VERIFIER_STATES; new sessions are placed on those that serve alone."""
        return "draining" if self.load.draining else "cordoned" if self.cordoned else "serving"


@dataclass(frozen=True)
class SessionStatus:
    """A session that holds a place, with what was last reported of it: zeros while nothing was."""

    stats: SessionStats
    reported: bool
    standby: str
    """Verifier that its device goes to if this one fails; empty where there is none."""


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

    windows: tuple[SessionWindow, ...] = ()
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

    decided: tuple[SessionWindow, ...]
    bounds: Mapping[str, WindowBounds]
    """By session id; those of "" are for all others."""
    total: int = 0
    """Of the decisions, those that are left out included."""


@dataclass(frozen=True)
class Fleet:
    """Everything that `status` shows."""

    verifiers: tuple[Verifier, ...]
    sessions: tuple[SessionStatus, ...]
    store: str
    uptime_s: float
    total_verifiers: int
    """Those that are left out included, as in the next."""
    total_sessions: int
