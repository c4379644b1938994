from outrider.wire.v1 import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class OpenSessionRequest(_message.Message):
    __slots__ = ("target", "rtt_ms", "prompt_tokens", "draft_release", "traffic_class")
    class RttMsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    TARGET_FIELD_NUMBER: _ClassVar[int]
    RTT_MS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_RELEASE_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_CLASS_FIELD_NUMBER: _ClassVar[int]
    target: str
    rtt_ms: _containers.ScalarMap[str, float]
    prompt_tokens: int
    draft_release: str
    traffic_class: str
    def __init__(self, target: _Optional[str] = ..., rtt_ms: _Optional[_Mapping[str, float]] = ..., prompt_tokens: _Optional[int] = ..., draft_release: _Optional[str] = ..., traffic_class: _Optional[str] = ...) -> None: ...

class Prior(_message.Message):
    __slots__ = ("first", "sibling", "observations")
    FIRST_FIELD_NUMBER: _ClassVar[int]
    SIBLING_FIELD_NUMBER: _ClassVar[int]
    OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    first: float
    sibling: float
    observations: int
    def __init__(self, first: _Optional[float] = ..., sibling: _Optional[float] = ..., observations: _Optional[int] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("verifier_id", "address", "tls", "ticket", "epoch_first", "epoch_last", "numerics_class")
    VERIFIER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIRST_FIELD_NUMBER: _ClassVar[int]
    EPOCH_LAST_FIELD_NUMBER: _ClassVar[int]
    NUMERICS_CLASS_FIELD_NUMBER: _ClassVar[int]
    verifier_id: str
    address: str
    tls: bool
    ticket: bytes
    epoch_first: int
    epoch_last: int
    numerics_class: str
    def __init__(self, verifier_id: _Optional[str] = ..., address: _Optional[str] = ..., tls: bool = ..., ticket: _Optional[bytes] = ..., epoch_first: _Optional[int] = ..., epoch_last: _Optional[int] = ..., numerics_class: _Optional[str] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("session_id", "target", "primary", "standby", "expires_unix", "prior")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_FIELD_NUMBER: _ClassVar[int]
    PRIOR_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    target: _session_pb2.TargetIdentity
    primary: Grant
    standby: Grant
    expires_unix: float
    prior: Prior
    def __init__(self, session_id: _Optional[str] = ..., target: _Optional[_Union[_session_pb2.TargetIdentity, _Mapping]] = ..., primary: _Optional[_Union[Grant, _Mapping]] = ..., standby: _Optional[_Union[Grant, _Mapping]] = ..., expires_unix: _Optional[float] = ..., prior: _Optional[_Union[Prior, _Mapping]] = ...) -> None: ...

class ResumeSessionRequest(_message.Message):
    __slots__ = ("session_id", "ticket", "failed_verifiers", "last_epoch", "rtt_ms")
    class RttMsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FAILED_VERIFIERS_FIELD_NUMBER: _ClassVar[int]
    LAST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    RTT_MS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    ticket: bytes
    failed_verifiers: _containers.RepeatedScalarFieldContainer[str]
    last_epoch: int
    rtt_ms: _containers.ScalarMap[str, float]
    def __init__(self, session_id: _Optional[str] = ..., ticket: _Optional[bytes] = ..., failed_verifiers: _Optional[_Iterable[str]] = ..., last_epoch: _Optional[int] = ..., rtt_ms: _Optional[_Mapping[str, float]] = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ("session_id", "ticket")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    ticket: bytes
    def __init__(self, session_id: _Optional[str] = ..., ticket: _Optional[bytes] = ...) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTargetsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTargetsResponse(_message.Message):
    __slots__ = ("targets",)
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    targets: _containers.RepeatedCompositeFieldContainer[_session_pb2.TargetIdentity]
    def __init__(self, targets: _Optional[_Iterable[_Union[_session_pb2.TargetIdentity, _Mapping]]] = ...) -> None: ...

class SignedTicket(_message.Message):
    __slots__ = ("claims", "signature", "key_id")
    CLAIMS_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    claims: bytes
    signature: bytes
    key_id: str
    def __init__(self, claims: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., key_id: _Optional[str] = ...) -> None: ...

class TicketClaims(_message.Message):
    __slots__ = ("session_id", "tenant", "audience", "epoch_first", "epoch_last", "expires_unix", "limits", "target")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    AUDIENCE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIRST_FIELD_NUMBER: _ClassVar[int]
    EPOCH_LAST_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    tenant: str
    audience: str
    epoch_first: int
    epoch_last: int
    expires_unix: float
    limits: _session_pb2.SessionLimits
    target: _session_pb2.TargetIdentity
    def __init__(self, session_id: _Optional[str] = ..., tenant: _Optional[str] = ..., audience: _Optional[str] = ..., epoch_first: _Optional[int] = ..., epoch_last: _Optional[int] = ..., expires_unix: _Optional[float] = ..., limits: _Optional[_Union[_session_pb2.SessionLimits, _Mapping]] = ..., target: _Optional[_Union[_session_pb2.TargetIdentity, _Mapping]] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("verifier_id", "address", "tls", "target", "capacity_sessions", "instance")
    VERIFIER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    verifier_id: str
    address: str
    tls: bool
    target: _session_pb2.TargetIdentity
    capacity_sessions: int
    instance: int
    def __init__(self, verifier_id: _Optional[str] = ..., address: _Optional[str] = ..., tls: bool = ..., target: _Optional[_Union[_session_pb2.TargetIdentity, _Mapping]] = ..., capacity_sessions: _Optional[int] = ..., instance: _Optional[int] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("lease_ms", "report_interval_ms", "public_keys")
    class PublicKeysEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    REPORT_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEYS_FIELD_NUMBER: _ClassVar[int]
    lease_ms: int
    report_interval_ms: int
    public_keys: _containers.ScalarMap[str, bytes]
    def __init__(self, lease_ms: _Optional[int] = ..., report_interval_ms: _Optional[int] = ..., public_keys: _Optional[_Mapping[str, bytes]] = ...) -> None: ...

class SessionReport(_message.Message):
    __slots__ = ("session_id", "epoch", "tenant", "steps", "committed", "evaluated", "accepted", "rtt_ms", "verdicts", "draft_ms", "nodes_per_level")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    RTT_MS_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MS_FIELD_NUMBER: _ClassVar[int]
    NODES_PER_LEVEL_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    tenant: str
    steps: int
    committed: int
    evaluated: int
    accepted: int
    rtt_ms: float
    verdicts: bytes
    draft_ms: float
    nodes_per_level: float
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., tenant: _Optional[str] = ..., steps: _Optional[int] = ..., committed: _Optional[int] = ..., evaluated: _Optional[int] = ..., accepted: _Optional[int] = ..., rtt_ms: _Optional[float] = ..., verdicts: _Optional[bytes] = ..., draft_ms: _Optional[float] = ..., nodes_per_level: _Optional[float] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("verifier_id", "instance", "live_sessions", "step_ms", "kv_used", "kv_capacity", "tokens_per_s", "draining", "sessions", "node_ms", "step_cost_ms", "session_cost_ms", "timing_ms", "overran")
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
    VERIFIER_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    LIVE_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    KV_USED_FIELD_NUMBER: _ClassVar[int]
    KV_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NODE_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_COST_MS_FIELD_NUMBER: _ClassVar[int]
    SESSION_COST_MS_FIELD_NUMBER: _ClassVar[int]
    TIMING_MS_FIELD_NUMBER: _ClassVar[int]
    OVERRAN_FIELD_NUMBER: _ClassVar[int]
    verifier_id: str
    instance: int
    live_sessions: int
    step_ms: float
    kv_used: int
    kv_capacity: int
    tokens_per_s: float
    draining: bool
    sessions: _containers.RepeatedCompositeFieldContainer[SessionReport]
    node_ms: float
    step_cost_ms: _containers.ScalarMap[int, float]
    session_cost_ms: float
    timing_ms: _containers.ScalarMap[str, float]
    overran: float
    def __init__(self, verifier_id: _Optional[str] = ..., instance: _Optional[int] = ..., live_sessions: _Optional[int] = ..., step_ms: _Optional[float] = ..., kv_used: _Optional[int] = ..., kv_capacity: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., draining: bool = ..., sessions: _Optional[_Iterable[_Union[SessionReport, _Mapping]]] = ..., node_ms: _Optional[float] = ..., step_cost_ms: _Optional[_Mapping[int, float]] = ..., session_cost_ms: _Optional[float] = ..., timing_ms: _Optional[_Mapping[str, float]] = ..., overran: _Optional[float] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ("known", "public_keys", "directives")
    class PublicKeysEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: bytes
        def __init__(self, key: _Optional[str] = ..., value: _Optional[bytes] = ...) -> None: ...
    KNOWN_FIELD_NUMBER: _ClassVar[int]
    PUBLIC_KEYS_FIELD_NUMBER: _ClassVar[int]
    DIRECTIVES_FIELD_NUMBER: _ClassVar[int]
    known: bool
    public_keys: _containers.ScalarMap[str, bytes]
    directives: _containers.RepeatedCompositeFieldContainer[SessionDirective]
    def __init__(self, known: bool = ..., public_keys: _Optional[_Mapping[str, bytes]] = ..., directives: _Optional[_Iterable[_Union[SessionDirective, _Mapping]]] = ...) -> None: ...

class SessionDirective(_message.Message):
    __slots__ = ("session_id", "epoch", "directive")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    DIRECTIVE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    directive: _session_pb2.Directive
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., directive: _Optional[_Union[_session_pb2.Directive, _Mapping]] = ...) -> None: ...

class DeregisterRequest(_message.Message):
    __slots__ = ("verifier_id", "instance")
    VERIFIER_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    verifier_id: str
    instance: int
    def __init__(self, verifier_id: _Optional[str] = ..., instance: _Optional[int] = ...) -> None: ...

class DeregisterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifierStatus(_message.Message):
    __slots__ = ("verifier_id", "address", "target", "capacity_sessions", "live_sessions", "step_ms", "tokens_per_s", "lease_s", "draining", "kv_used", "kv_capacity", "node_ms", "timing_ms", "step_cost_ms", "session_cost_ms", "overran")
    class TimingMsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class StepCostMsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    VERIFIER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LIVE_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    KV_USED_FIELD_NUMBER: _ClassVar[int]
    KV_CAPACITY_FIELD_NUMBER: _ClassVar[int]
    NODE_MS_FIELD_NUMBER: _ClassVar[int]
    TIMING_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_COST_MS_FIELD_NUMBER: _ClassVar[int]
    SESSION_COST_MS_FIELD_NUMBER: _ClassVar[int]
    OVERRAN_FIELD_NUMBER: _ClassVar[int]
    verifier_id: str
    address: str
    target: _session_pb2.TargetIdentity
    capacity_sessions: int
    live_sessions: int
    step_ms: float
    tokens_per_s: float
    lease_s: float
    draining: bool
    kv_used: int
    kv_capacity: int
    node_ms: float
    timing_ms: _containers.ScalarMap[str, float]
    step_cost_ms: _containers.ScalarMap[int, float]
    session_cost_ms: float
    overran: float
    def __init__(self, verifier_id: _Optional[str] = ..., address: _Optional[str] = ..., target: _Optional[_Union[_session_pb2.TargetIdentity, _Mapping]] = ..., capacity_sessions: _Optional[int] = ..., live_sessions: _Optional[int] = ..., step_ms: _Optional[float] = ..., tokens_per_s: _Optional[float] = ..., lease_s: _Optional[float] = ..., draining: bool = ..., kv_used: _Optional[int] = ..., kv_capacity: _Optional[int] = ..., node_ms: _Optional[float] = ..., timing_ms: _Optional[_Mapping[str, float]] = ..., step_cost_ms: _Optional[_Mapping[int, float]] = ..., session_cost_ms: _Optional[float] = ..., overran: _Optional[float] = ...) -> None: ...

class SessionStatus(_message.Message):
    __slots__ = ("session_id", "tenant", "verifier_id", "epoch", "committed", "tokens_per_step", "rtt_ms")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    RTT_MS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    tenant: str
    verifier_id: str
    epoch: int
    committed: int
    tokens_per_step: float
    rtt_ms: float
    def __init__(self, session_id: _Optional[str] = ..., tenant: _Optional[str] = ..., verifier_id: _Optional[str] = ..., epoch: _Optional[int] = ..., committed: _Optional[int] = ..., tokens_per_step: _Optional[float] = ..., rtt_ms: _Optional[float] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("verifiers", "sessions", "store", "uptime_s")
    VERIFIERS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    verifiers: _containers.RepeatedCompositeFieldContainer[VerifierStatus]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStatus]
    store: str
    uptime_s: float
    def __init__(self, verifiers: _Optional[_Iterable[_Union[VerifierStatus, _Mapping]]] = ..., sessions: _Optional[_Iterable[_Union[SessionStatus, _Mapping]]] = ..., store: _Optional[str] = ..., uptime_s: _Optional[float] = ...) -> None: ...

class WindowBounds(_message.Message):
    __slots__ = ("k", "depth", "pinned", "patience_ms", "nodes_per_level")
    K_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_MS_FIELD_NUMBER: _ClassVar[int]
    NODES_PER_LEVEL_FIELD_NUMBER: _ClassVar[int]
    k: int
    depth: int
    pinned: bool
    patience_ms: float
    nodes_per_level: float
    def __init__(self, k: _Optional[int] = ..., depth: _Optional[int] = ..., pinned: bool = ..., patience_ms: _Optional[float] = ..., nodes_per_level: _Optional[float] = ...) -> None: ...

class ShowWindowsRequest(_message.Message):
    __slots__ = ("session_id",)
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    def __init__(self, session_id: _Optional[str] = ...) -> None: ...

class SessionWindow(_message.Message):
    __slots__ = ("session_id", "verifier_id", "k", "depth", "patience_ms", "price", "speedup", "reason", "rtt_ms", "draft_ms", "verdicts", "hits", "bounds", "tokens_per_step", "nodes_per_level")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_ID_FIELD_NUMBER: _ClassVar[int]
    K_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    PATIENCE_MS_FIELD_NUMBER: _ClassVar[int]
    PRICE_FIELD_NUMBER: _ClassVar[int]
    SPEEDUP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RTT_MS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MS_FIELD_NUMBER: _ClassVar[int]
    VERDICTS_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    NODES_PER_LEVEL_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    verifier_id: str
    k: int
    depth: int
    patience_ms: float
    price: float
    speedup: float
    reason: str
    rtt_ms: float
    draft_ms: float
    verdicts: int
    hits: float
    bounds: WindowBounds
    tokens_per_step: float
    nodes_per_level: float
    def __init__(self, session_id: _Optional[str] = ..., verifier_id: _Optional[str] = ..., k: _Optional[int] = ..., depth: _Optional[int] = ..., patience_ms: _Optional[float] = ..., price: _Optional[float] = ..., speedup: _Optional[float] = ..., reason: _Optional[str] = ..., rtt_ms: _Optional[float] = ..., draft_ms: _Optional[float] = ..., verdicts: _Optional[int] = ..., hits: _Optional[float] = ..., bounds: _Optional[_Union[WindowBounds, _Mapping]] = ..., tokens_per_step: _Optional[float] = ..., nodes_per_level: _Optional[float] = ...) -> None: ...

class ShowWindowsResponse(_message.Message):
    __slots__ = ("windows", "everybody")
    WINDOWS_FIELD_NUMBER: _ClassVar[int]
    EVERYBODY_FIELD_NUMBER: _ClassVar[int]
    windows: _containers.RepeatedCompositeFieldContainer[SessionWindow]
    everybody: WindowBounds
    def __init__(self, windows: _Optional[_Iterable[_Union[SessionWindow, _Mapping]]] = ..., everybody: _Optional[_Union[WindowBounds, _Mapping]] = ...) -> None: ...

class BoundWindowRequest(_message.Message):
    __slots__ = ("session_id", "bounds")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    bounds: WindowBounds
    def __init__(self, session_id: _Optional[str] = ..., bounds: _Optional[_Union[WindowBounds, _Mapping]] = ...) -> None: ...

class BoundWindowResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
