"""Define what a verifier measures of itself and of each live session, from the engine to the coordinator's decision.

The engine fills in what it measures, the gRPC front adds what only it knows, and the coordinator decides from the
result. `outrider.wire.telemetry` converts both classes to protobuf and back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class SessionTelemetry:
    """Describes one live session in one epoch on this verifier; counts begin with the epoch."""

    session_id: str
    epoch: int = 0
    tenant: str = ""
    """Tenant of the session's ticket; filled in by the front."""
    steps: int = 0
    """Verification steps that committed tokens of the session."""
    committed: int = 0
    """Tokens."""
    evaluated: int = 0
    """Draft nodes of the device that went through a verification step."""
    accepted: int = 0
    """Evaluated nodes that were committed."""
    rtt_ms: float = 0.0
    """Round trip to the device; 0 if not measured yet. Filled in by the front."""
    acceptance_history: bytes = b""
    """Outcome of the device's proposals for the last positions, oldest first (outrider.core.acceptance.history)."""
    draft_ms: float = 0.0
    """Time in which the device drafts one level of its tree; 0 if not known."""
    nodes_per_level: float = 0.0
    """The first proposal of a level and its siblings; 0 if not known."""
    draft_release: str = ""
    """Release that the device drafts with, as the device says; empty if it does not say."""
    traffic_class: str = ""
    """Traffic class of the session's ticket; filled in by the front."""
    positions: int = 0
    """Positions committed since the first proposal with this draft release was judged, including positions without a
    proposal."""
    first_accepted: int = 0
    """Those of these positions whose first proposal was accepted."""
    dead: int = 0
    """Nodes that arrived too late, or below such a node."""
    ignored: int = 0
    """Nodes that no step could take since they were outside the speculation window; each counts once."""
    lossy: bool = False
    """Whether its acceptance rule changes the output; its acceptance says nothing of a release or of a workload."""
    server_gain: float = 0.0
    """Tokens that nodes of the verifier's own sources would have added to a recent step without the device's, on
    average."""


@dataclass(frozen=True)
class VerifierTelemetry:
    """Describes a verifier. Times are moving averages over steps that only generated tokens."""

    live_sessions: int = 0
    draining: bool = False
    """Filled in by the front."""
    step_ms: float = 0.0
    """Time from the begin of one step to the begin of the next while there is work: a device plans with it."""
    tokens_per_s: float = 0.0
    """Tokens committed per second of wall-clock time, over the last few seconds."""
    kv_used: int = 0
    """KV slots of live sessions."""
    kv_capacity: int = 0
    """KV slots in all."""
    min_acceptance: float = 0.0
    """Least probability of acceptance, 0 to 1, at which a node is worth evaluating now."""
    node_ms: float = 0.0
    """Time that one more node adds to a step of the present size, by the cost model."""
    step_cost_ms: Mapping[int, float] = field(default_factory=dict)
    """The cost model: rows of one session -> milliseconds of a step."""
    session_cost_ms: float = 0.0
    """The cost model: time that each further session adds to a step beside its rows."""
    timing_ms: Mapping[str, float] = field(default_factory=dict)
    """The parts of a step, which sum to step_ms."""
    evaluated: int = 0
    """Nodes, over the live sessions; filled in by the coordinator, like the next two fields."""
    accepted: int = 0
    """Nodes, over the live sessions."""
    rtt_ms: float = 0.0
    """Median round trip of the live sessions; 0 if none is measured."""
