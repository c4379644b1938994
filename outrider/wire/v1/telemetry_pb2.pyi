from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class SessionTelemetry(_message.Message):
    __slots__ = ("session_id", "epoch", "tenant", "steps", "committed", "evaluated", "accepted", "rtt_ms", "acceptance_history", "draft_ms", "nodes_per_level", "draft_release", "traffic_class", "positions", "first_accepted", "dead", "ignored", "lossy", "server_gain")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    RTT_MS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_HISTORY_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MS_FIELD_NUMBER: _ClassVar[int]
    NODES_PER_LEVEL_FIELD_NUMBER: _ClassVar[int]
    DRAFT_RELEASE_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_CLASS_FIELD_NUMBER: _ClassVar[int]
    POSITIONS_FIELD_NUMBER: _ClassVar[int]
    FIRST_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    IGNORED_FIELD_NUMBER: _ClassVar[int]
    LOSSY_FIELD_NUMBER: _ClassVar[int]
    SERVER_GAIN_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    tenant: str
    steps: int
    committed: int
    evaluated: int
    accepted: int
    rtt_ms: float
    acceptance_history: bytes
    draft_ms: float
    nodes_per_level: float
    draft_release: str
    traffic_class: str
    positions: int
    first_accepted: int
    dead: int
    ignored: int
    lossy: bool
    server_gain: float
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., tenant: _Optional[str] = ..., steps: _Optional[int] = ..., committed: _Optional[int] = ..., evaluated: _Optional[int] = ..., accepted: _Optional[int] = ..., rtt_ms: _Optional[float] = ..., acceptance_history: _Optional[bytes] = ..., draft_ms: _Optional[float] = ..., nodes_per_level: _Optional[float] = ..., draft_release: _Optional[str] = ..., traffic_class: _Optional[str] = ..., positions: _Optional[int] = ..., first_accepted: _Optional[int] = ..., dead: _Optional[int] = ..., ignored: _Optional[int] = ..., lossy: bool = ..., server_gain: _Optional[float] = ...) -> None: ...

class VerifierTelemetry(_message.Message):
    __slots__ = ("live_sessions", "draining", "step_ms", "tokens_per_s", "kv_used", "kv_capacity", "min_acceptance", "node_ms", "step_cost_ms", "session_cost_ms", "timing_ms", "evaluated", "accepted", "rtt_ms", "clock_ahead_s")
    class StepCostMsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    class TimingMsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    LIVE_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    KV_USED_FIELD_NUMBER: _ClassVar[int]
    KV_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    MIN_ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    NODE_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_COST_MS_FIELD_NUMBER: _ClassVar[int]
    SESSION_COST_MS_FIELD_NUMBER: _ClassVar[int]
    TIMING_MS_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    RTT_MS_FIELD_NUMBER: _ClassVar[int]
    CLOCK_AHEAD_S_FIELD_NUMBER: _ClassVar[int]
    live_sessions: int
    draining: bool
    step_ms: float
    tokens_per_s: float
    kv_used: int
    kv_capacity: int
    min_acceptance: float
    node_ms: float
    step_cost_ms: _containers.ScalarMap[int, float]
    session_cost_ms: float
    timing_ms: _containers.ScalarMap[str, float]
    evaluated: int
    accepted: int
    rtt_ms: float
    clock_ahead_s: float
    def __init__(self, live_sessions: _Optional[int] = ..., draining: bool = ..., step_ms: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., kv_used: _Optional[int] = ..., kv_capacity: _Optional[int] = ..., min_acceptance: _Optional[float] = ..., node_ms: _Optional[float] = ..., step_cost_ms: _Optional[_Mapping[int, float]] = ..., session_cost_ms: _Optional[float] = ..., timing_ms: _Optional[_Mapping[str, float]] = ..., evaluated: _Optional[int] = ..., accepted: _Optional[int] = ..., rtt_ms: _Optional[float] = ..., clock_ahead_s: _Optional[float] = ...) -> None: ...
