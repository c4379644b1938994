from outrider.wire.v1 import session_pb2 as _session_pb2
from outrider.wire.v1 import telemetry_pb2 as _telemetry_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class VerifierAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    VERIFIER_ACTION_UNSPECIFIED: _ClassVar[VerifierAction]
    VERIFIER_ACTION_CORDON: _ClassVar[VerifierAction]
    VERIFIER_ACTION_UNCORDON: _ClassVar[VerifierAction]
    VERIFIER_ACTION_DRAIN: _ClassVar[VerifierAction]

class SessionAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SESSION_ACTION_UNSPECIFIED: _ClassVar[SessionAction]
    SESSION_ACTION_KILL: _ClassVar[SessionAction]
    SESSION_ACTION_BOUND: _ClassVar[SessionAction]

class TenantAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TENANT_ACTION_UNSPECIFIED: _ClassVar[TenantAction]
    TENANT_ACTION_CREATE: _ClassVar[TenantAction]
    TENANT_ACTION_SET_LIMITS: _ClassVar[TenantAction]
    TENANT_ACTION_REVOKE: _ClassVar[TenantAction]

class ReleaseState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RELEASE_STATE_UNSPECIFIED: _ClassVar[ReleaseState]
    RELEASE_STATE_CANDIDATE: _ClassVar[ReleaseState]
    RELEASE_STATE_CANARY: _ClassVar[ReleaseState]
    RELEASE_STATE_STABLE: _ClassVar[ReleaseState]
    RELEASE_STATE_SUPERSEDED: _ClassVar[ReleaseState]
    RELEASE_STATE_ROLLED_BACK: _ClassVar[ReleaseState]

class ReleaseAction(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RELEASE_ACTION_UNSPECIFIED: _ClassVar[ReleaseAction]
    RELEASE_ACTION_PROMOTE: _ClassVar[ReleaseAction]
    RELEASE_ACTION_ROLL_BACK: _ClassVar[ReleaseAction]
    RELEASE_ACTION_PIN: _ClassVar[ReleaseAction]
    RELEASE_ACTION_UNPIN: _ClassVar[ReleaseAction]
    RELEASE_ACTION_PUBLISH: _ClassVar[ReleaseAction]
VERIFIER_ACTION_UNSPECIFIED: VerifierAction
VERIFIER_ACTION_CORDON: VerifierAction
VERIFIER_ACTION_UNCORDON: VerifierAction
VERIFIER_ACTION_DRAIN: VerifierAction
SESSION_ACTION_UNSPECIFIED: SessionAction
SESSION_ACTION_KILL: SessionAction
SESSION_ACTION_BOUND: SessionAction
TENANT_ACTION_UNSPECIFIED: TenantAction
TENANT_ACTION_CREATE: TenantAction
TENANT_ACTION_SET_LIMITS: TenantAction
TENANT_ACTION_REVOKE: TenantAction
RELEASE_STATE_UNSPECIFIED: ReleaseState
RELEASE_STATE_CANDIDATE: ReleaseState
RELEASE_STATE_CANARY: ReleaseState
RELEASE_STATE_STABLE: ReleaseState
RELEASE_STATE_SUPERSEDED: ReleaseState
RELEASE_STATE_ROLLED_BACK: ReleaseState
RELEASE_ACTION_UNSPECIFIED: ReleaseAction
RELEASE_ACTION_PROMOTE: ReleaseAction
RELEASE_ACTION_ROLL_BACK: ReleaseAction
RELEASE_ACTION_PIN: ReleaseAction
RELEASE_ACTION_UNPIN: ReleaseAction
RELEASE_ACTION_PUBLISH: ReleaseAction

class OpenSessionRequest(_message.Message):
    __slots__ = ("target", "prompt_tokens", "draft_release", "traffic_class", "device_id")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_RELEASE_FIELD_NUMBER: _ClassVar[int]
    TRAFFIC_CLASS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    target: str
    prompt_tokens: int
    draft_release: str
    traffic_class: str
    device_id: str
    def __init__(self, target: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., draft_release: _Optional[str] = ..., traffic_class: _Optional[str] = ..., device_id: _Optional[str] = ...) -> None: ...

class Prior(_message.Message):
    __slots__ = ("first_acceptance", "sibling_acceptance", "observations")
    FIRST_ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    SIBLING_ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    first_acceptance: float
    sibling_acceptance: float
    observations: int
    def __init__(self, first_acceptance: _Optional[float] = ..., sibling_acceptance: _Optional[float] = ..., observations: _Optional[int] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("verifier_id", "address", "tls", "ticket", "epoch_first", "epoch_last", "limits")
    VERIFIER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TLS_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIRST_FIELD_NUMBER: _ClassVar[int]
    EPOCH_LAST_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    verifier_id: str
    address: str
    tls: bool
    ticket: bytes
    epoch_first: int
    epoch_last: int
    limits: _session_pb2.SessionLimits
    def __init__(self, verifier_id: _Optional[str] = ..., address: _Optional[str] = ..., tls: bool = ..., ticket: _Optional[bytes] = ..., epoch_first: _Optional[int] = ..., epoch_last: _Optional[int] = ..., limits: _Optional[_Union[_session_pb2.SessionLimits, _Mapping]] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("session_id", "target", "primary", "standby", "expires_unix", "prior", "release_serial")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    PRIMARY_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_FIELD_NUMBER: _ClassVar[int]
    PRIOR_FIELD_NUMBER: _ClassVar[int]
    RELEASE_SERIAL_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    target: _session_pb2.TargetIdentity
    primary: Grant
    standby: Grant
    expires_unix: float
    prior: Prior
    release_serial: int
    def __init__(self, session_id: _Optional[str] = ..., target: _Optional[_Union[_session_pb2.TargetIdentity, _Mapping]] = ..., primary: _Optional[_Union[Grant, _Mapping]] = ..., standby: _Optional[_Union[Grant, _Mapping]] = ..., expires_unix: _Optional[float] = ..., prior: _Optional[_Union[Prior, _Mapping]] = ..., release_serial: _Optional[int] = ...) -> None: ...

class ResumeSessionRequest(_message.Message):
    __slots__ = ("session_id", "ticket", "failed_verifiers", "last_epoch")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    FAILED_VERIFIERS_FIELD_NUMBER: _ClassVar[int]
    LAST_EPOCH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    ticket: bytes
    failed_verifiers: _containers.RepeatedScalarFieldContainer[str]
    last_epoch: int
    def __init__(self, session_id: _Optional[str] = ..., ticket: _Optional[bytes] = ..., failed_verifiers: _Optional[_Iterable[str]] = ..., last_epoch: _Optional[int] = ...) -> None: ...

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
    __slots__ = ("lease_ms", "report_interval_ms", "public_keys", "unix")
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
    UNIX_FIELD_NUMBER: _ClassVar[int]
    lease_ms: int
    report_interval_ms: int
    public_keys: _containers.ScalarMap[str, bytes]
    unix: float
    def __init__(self, lease_ms: _Optional[int] = ..., report_interval_ms: _Optional[int] = ..., public_keys: _Optional[_Mapping[str, bytes]] = ..., unix: _Optional[float] = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("verifier_id", "instance", "verifier", "sessions", "revocations_seen", "tenant_tokens", "tokens_sequence")
    class TenantTokensEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    VERIFIER_ID_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    REVOCATIONS_SEEN_FIELD_NUMBER: _ClassVar[int]
    TENANT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    verifier_id: str
    instance: int
    verifier: _telemetry_pb2.VerifierTelemetry
    sessions: _containers.RepeatedCompositeFieldContainer[_telemetry_pb2.SessionTelemetry]
    revocations_seen: int
    tenant_tokens: _containers.ScalarMap[str, int]
    tokens_sequence: int
    def __init__(self, verifier_id: _Optional[str] = ..., instance: _Optional[int] = ..., verifier: _Optional[_Union[_telemetry_pb2.VerifierTelemetry, _Mapping]] = ..., sessions: _Optional[_Iterable[_Union[_telemetry_pb2.SessionTelemetry, _Mapping]]] = ..., revocations_seen: _Optional[int] = ..., tenant_tokens: _Optional[_Mapping[str, int]] = ..., tokens_sequence: _Optional[int] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ("known", "public_keys", "directives", "release_serial", "drain", "closed", "revocations", "revocations_seen", "store_unix", "contended", "exhausted_tenants", "unix")
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
    RELEASE_SERIAL_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    REVOCATIONS_FIELD_NUMBER: _ClassVar[int]
    REVOCATIONS_SEEN_FIELD_NUMBER: _ClassVar[int]
    STORE_UNIX_FIELD_NUMBER: _ClassVar[int]
    CONTENDED_FIELD_NUMBER: _ClassVar[int]
    EXHAUSTED_TENANTS_FIELD_NUMBER: _ClassVar[int]
    UNIX_FIELD_NUMBER: _ClassVar[int]
    known: bool
    public_keys: _containers.ScalarMap[str, bytes]
    directives: _containers.RepeatedCompositeFieldContainer[SessionDirective]
    release_serial: int
    drain: bool
    closed: _containers.RepeatedScalarFieldContainer[str]
    revocations: _containers.RepeatedCompositeFieldContainer[Revocation]
    revocations_seen: int
    store_unix: float
    contended: bool
    exhausted_tenants: _containers.RepeatedScalarFieldContainer[str]
    unix: float
    def __init__(self, known: bool = ..., public_keys: _Optional[_Mapping[str, bytes]] = ..., directives: _Optional[_Iterable[_Union[SessionDirective, _Mapping]]] = ..., release_serial: _Optional[int] = ..., drain: bool = ..., closed: _Optional[_Iterable[str]] = ..., revocations: _Optional[_Iterable[_Union[Revocation, _Mapping]]] = ..., revocations_seen: _Optional[int] = ..., store_unix: _Optional[float] = ..., contended: bool = ..., exhausted_tenants: _Optional[_Iterable[str]] = ..., unix: _Optional[float] = ...) -> None: ...

class Revocation(_message.Message):
    __slots__ = ("session_id", "api_key_id", "until_unix")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    API_KEY_ID_FIELD_NUMBER: _ClassVar[int]
    UNTIL_UNIX_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    api_key_id: str
    until_unix: float
    def __init__(self, session_id: _Optional[str] = ..., api_key_id: _Optional[str] = ..., until_unix: _Optional[float] = ...) -> None: ...

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

class VerifierStatus(_message.Message):
    __slots__ = ("verifier_id", "address", "target", "capacity_sessions", "lease_s", "cordoned", "telemetry", "restarts")
    VERIFIER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    LEASE_S_FIELD_NUMBER: _ClassVar[int]
    CORDONED_FIELD_NUMBER: _ClassVar[int]
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    verifier_id: str
    address: str
    target: _session_pb2.TargetIdentity
    capacity_sessions: int
    lease_s: float
    cordoned: bool
    telemetry: _telemetry_pb2.VerifierTelemetry
    restarts: int
    def __init__(self, verifier_id: _Optional[str] = ..., address: _Optional[str] = ..., target: _Optional[_Union[_session_pb2.TargetIdentity, _Mapping]] = ..., capacity_sessions: _Optional[int] = ..., lease_s: _Optional[float] = ..., cordoned: bool = ..., telemetry: _Optional[_Union[_telemetry_pb2.VerifierTelemetry, _Mapping]] = ..., restarts: _Optional[int] = ...) -> None: ...

class SessionStatus(_message.Message):
    __slots__ = ("telemetry", "verifier_id", "standby", "reported", "window")
    TELEMETRY_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_ID_FIELD_NUMBER: _ClassVar[int]
    STANDBY_FIELD_NUMBER: _ClassVar[int]
    REPORTED_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    telemetry: _telemetry_pb2.SessionTelemetry
    verifier_id: str
    standby: str
    reported: bool
    window: WindowDecision
    def __init__(self, telemetry: _Optional[_Union[_telemetry_pb2.SessionTelemetry, _Mapping]] = ..., verifier_id: _Optional[str] = ..., standby: _Optional[str] = ..., reported: bool = ..., window: _Optional[_Union[WindowDecision, _Mapping]] = ...) -> None: ...

class ListVerifiersRequest(_message.Message):
    __slots__ = ("verifier_id", "after", "limit")
    VERIFIER_ID_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    verifier_id: str
    after: str
    limit: int
    def __init__(self, verifier_id: _Optional[str] = ..., after: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ListVerifiersResponse(_message.Message):
    __slots__ = ("verifiers", "next", "total", "store", "uptime_s", "lost_s")
    class LostSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VERIFIERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    STORE_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    LOST_S_FIELD_NUMBER: _ClassVar[int]
    verifiers: _containers.RepeatedCompositeFieldContainer[VerifierStatus]
    next: str
    total: int
    store: str
    uptime_s: float
    lost_s: _containers.ScalarMap[str, float]
    def __init__(self, verifiers: _Optional[_Iterable[_Union[VerifierStatus, _Mapping]]] = ..., next: _Optional[str] = ..., total: _Optional[int] = ..., store: _Optional[str] = ..., uptime_s: _Optional[float] = ..., lost_s: _Optional[_Mapping[str, float]] = ...) -> None: ...

class UpdateVerifierRequest(_message.Message):
    __slots__ = ("verifier_id", "action")
    VERIFIER_ID_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    verifier_id: str
    action: VerifierAction
    def __init__(self, verifier_id: _Optional[str] = ..., action: _Optional[_Union[VerifierAction, str]] = ...) -> None: ...

class UpdateVerifierResponse(_message.Message):
    __slots__ = ("verifier",)
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    verifier: VerifierStatus
    def __init__(self, verifier: _Optional[_Union[VerifierStatus, _Mapping]] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ("session_id", "verifier_id", "tenant", "after", "limit")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_ID_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    verifier_id: str
    tenant: str
    after: str
    limit: int
    def __init__(self, session_id: _Optional[str] = ..., verifier_id: _Optional[str] = ..., tenant: _Optional[str] = ..., after: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions", "next", "total", "default_bounds")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_BOUNDS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionStatus]
    next: str
    total: int
    default_bounds: WindowBounds
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionStatus, _Mapping]]] = ..., next: _Optional[str] = ..., total: _Optional[int] = ..., default_bounds: _Optional[_Union[WindowBounds, _Mapping]] = ...) -> None: ...

class UpdateSessionRequest(_message.Message):
    __slots__ = ("session_id", "action", "bounds")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    action: SessionAction
    bounds: WindowBounds
    def __init__(self, session_id: _Optional[str] = ..., action: _Optional[_Union[SessionAction, str]] = ..., bounds: _Optional[_Union[WindowBounds, _Mapping]] = ...) -> None: ...

class UpdateSessionResponse(_message.Message):
    __slots__ = ("verifier_id",)
    VERIFIER_ID_FIELD_NUMBER: _ClassVar[int]
    verifier_id: str
    def __init__(self, verifier_id: _Optional[str] = ...) -> None: ...

class Tenant(_message.Message):
    __slots__ = ("name", "created_unix", "revoked_unix", "configured", "limits", "use", "key_hash")
    NAME_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_FIELD_NUMBER: _ClassVar[int]
    REVOKED_UNIX_FIELD_NUMBER: _ClassVar[int]
    CONFIGURED_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    USE_FIELD_NUMBER: _ClassVar[int]
    KEY_HASH_FIELD_NUMBER: _ClassVar[int]
    name: str
    created_unix: float
    revoked_unix: float
    configured: bool
    limits: TenantLimits
    use: TenantUse
    key_hash: str
    def __init__(self, name: _Optional[str] = ..., created_unix: _Optional[float] = ..., revoked_unix: _Optional[float] = ..., configured: bool = ..., limits: _Optional[_Union[TenantLimits, _Mapping]] = ..., use: _Optional[_Union[TenantUse, _Mapping]] = ..., key_hash: _Optional[str] = ...) -> None: ...

class TenantLimits(_message.Message):
    __slots__ = ("max_places", "opens_per_minute", "tokens_per_minute", "max_streams")
    MAX_PLACES_FIELD_NUMBER: _ClassVar[int]
    OPENS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    MAX_STREAMS_FIELD_NUMBER: _ClassVar[int]
    max_places: int
    opens_per_minute: int
    tokens_per_minute: int
    max_streams: int
    def __init__(self, max_places: _Optional[int] = ..., opens_per_minute: _Optional[int] = ..., tokens_per_minute: _Optional[int] = ..., max_streams: _Optional[int] = ...) -> None: ...

class TenantUse(_message.Message):
    __slots__ = ("places", "opens", "tokens")
    PLACES_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    places: int
    opens: float
    tokens: float
    def __init__(self, places: _Optional[int] = ..., opens: _Optional[float] = ..., tokens: _Optional[float] = ...) -> None: ...

class ListTenantsRequest(_message.Message):
    __slots__ = ("after", "limit")
    AFTER_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    after: str
    limit: int
    def __init__(self, after: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class ListTenantsResponse(_message.Message):
    __slots__ = ("tenants", "next", "anonymous")
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_FIELD_NUMBER: _ClassVar[int]
    ANONYMOUS_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[Tenant]
    next: str
    anonymous: bool
    def __init__(self, tenants: _Optional[_Iterable[_Union[Tenant, _Mapping]]] = ..., next: _Optional[str] = ..., anonymous: bool = ...) -> None: ...

class UpdateTenantRequest(_message.Message):
    __slots__ = ("name", "action", "limits", "defaults")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    DEFAULTS_FIELD_NUMBER: _ClassVar[int]
    name: str
    action: TenantAction
    limits: TenantLimits
    defaults: bool
    def __init__(self, name: _Optional[str] = ..., action: _Optional[_Union[TenantAction, str]] = ..., limits: _Optional[_Union[TenantLimits, _Mapping]] = ..., defaults: bool = ...) -> None: ...

class UpdateTenantResponse(_message.Message):
    __slots__ = ("tenant", "key")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    tenant: Tenant
    key: str
    def __init__(self, tenant: _Optional[_Union[Tenant, _Mapping]] = ..., key: _Optional[str] = ...) -> None: ...

class Window(_message.Message):
    __slots__ = ("k", "depth", "draft_wait_ms", "nodes_per_level")
    K_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    NODES_PER_LEVEL_FIELD_NUMBER: _ClassVar[int]
    k: int
    depth: int
    draft_wait_ms: float
    nodes_per_level: float
    def __init__(self, k: _Optional[int] = ..., depth: _Optional[int] = ..., draft_wait_ms: _Optional[float] = ..., nodes_per_level: _Optional[float] = ...) -> None: ...

class WindowBounds(_message.Message):
    __slots__ = ("window", "pinned")
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    window: Window
    pinned: bool
    def __init__(self, window: _Optional[_Union[Window, _Mapping]] = ..., pinned: bool = ...) -> None: ...

class WindowDecision(_message.Message):
    __slots__ = ("session_id", "verifier_id", "window", "min_acceptance", "speedup", "tokens_per_step", "reason", "rtt_ms", "draft_ms", "observations", "first_acceptance", "bounds", "epoch", "max_k", "step_ms")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_ID_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    MIN_ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    SPEEDUP_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RTT_MS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MS_FIELD_NUMBER: _ClassVar[int]
    OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    FIRST_ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    BOUNDS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MAX_K_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    verifier_id: str
    window: Window
    min_acceptance: float
    speedup: float
    tokens_per_step: float
    reason: str
    rtt_ms: float
    draft_ms: float
    observations: int
    first_acceptance: float
    bounds: WindowBounds
    epoch: int
    max_k: int
    step_ms: float
    def __init__(self, session_id: _Optional[str] = ..., verifier_id: _Optional[str] = ..., window: _Optional[_Union[Window, _Mapping]] = ..., min_acceptance: _Optional[float] = ..., speedup: _Optional[float] = ..., tokens_per_step: _Optional[float] = ..., reason: _Optional[str] = ..., rtt_ms: _Optional[float] = ..., draft_ms: _Optional[float] = ..., observations: _Optional[int] = ..., first_acceptance: _Optional[float] = ..., bounds: _Optional[_Union[WindowBounds, _Mapping]] = ..., epoch: _Optional[int] = ..., max_k: _Optional[int] = ..., step_ms: _Optional[float] = ...) -> None: ...

class WindowDecisions(_message.Message):
    __slots__ = ("decisions",)
    DECISIONS_FIELD_NUMBER: _ClassVar[int]
    decisions: _containers.RepeatedCompositeFieldContainer[WindowDecision]
    def __init__(self, decisions: _Optional[_Iterable[_Union[WindowDecision, _Mapping]]] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("version", "parent", "weights_hash", "tokenizer_hash", "artifact", "size", "quantization", "urls", "metrics", "created_unix")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    ARTIFACT_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    QUANTIZATION_FIELD_NUMBER: _ClassVar[int]
    URLS_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_FIELD_NUMBER: _ClassVar[int]
    version: int
    parent: str
    weights_hash: str
    tokenizer_hash: str
    artifact: str
    size: int
    quantization: str
    urls: _containers.RepeatedScalarFieldContainer[str]
    metrics: _containers.ScalarMap[str, float]
    created_unix: float
    def __init__(self, version: _Optional[int] = ..., parent: _Optional[str] = ..., weights_hash: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., artifact: _Optional[str] = ..., size: _Optional[int] = ..., quantization: _Optional[str] = ..., urls: _Optional[_Iterable[str]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., created_unix: _Optional[float] = ...) -> None: ...

class SignedManifest(_message.Message):
    __slots__ = ("manifest", "signature", "key_id")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    signature: bytes
    key_id: str
    def __init__(self, manifest: _Optional[bytes] = ..., signature: _Optional[bytes] = ..., key_id: _Optional[str] = ...) -> None: ...

class OfferReleaseRequest(_message.Message):
    __slots__ = ("target", "device_id", "in_use")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    DEVICE_ID_FIELD_NUMBER: _ClassVar[int]
    IN_USE_FIELD_NUMBER: _ClassVar[int]
    target: str
    device_id: str
    in_use: str
    def __init__(self, target: _Optional[str] = ..., device_id: _Optional[str] = ..., in_use: _Optional[str] = ...) -> None: ...

class OfferReleaseResponse(_message.Message):
    __slots__ = ("serial", "manifest", "canary", "base_url")
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    CANARY_FIELD_NUMBER: _ClassVar[int]
    BASE_URL_FIELD_NUMBER: _ClassVar[int]
    serial: int
    manifest: bytes
    canary: bool
    base_url: str
    def __init__(self, serial: _Optional[int] = ..., manifest: _Optional[bytes] = ..., canary: bool = ..., base_url: _Optional[str] = ...) -> None: ...

class ReleaseEvidence(_message.Message):
    __slots__ = ("canary_samples", "stable_samples", "canary_acceptance", "stable_acceptance", "log_better", "log_worse", "tenants", "tenants_needed")
    CANARY_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    STABLE_SAMPLES_FIELD_NUMBER: _ClassVar[int]
    CANARY_ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    STABLE_ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    LOG_BETTER_FIELD_NUMBER: _ClassVar[int]
    LOG_WORSE_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    TENANTS_NEEDED_FIELD_NUMBER: _ClassVar[int]
    canary_samples: int
    stable_samples: int
    canary_acceptance: float
    stable_acceptance: float
    log_better: float
    log_worse: float
    tenants: int
    tenants_needed: int
    def __init__(self, canary_samples: _Optional[int] = ..., stable_samples: _Optional[int] = ..., canary_acceptance: _Optional[float] = ..., stable_acceptance: _Optional[float] = ..., log_better: _Optional[float] = ..., log_worse: _Optional[float] = ..., tenants: _Optional[int] = ..., tenants_needed: _Optional[int] = ...) -> None: ...

class Release(_message.Message):
    __slots__ = ("manifest", "state", "share", "since_unix", "reason", "pinned", "evidence", "version", "name")
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SHARE_FIELD_NUMBER: _ClassVar[int]
    SINCE_UNIX_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PINNED_FIELD_NUMBER: _ClassVar[int]
    EVIDENCE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    manifest: bytes
    state: ReleaseState
    share: float
    since_unix: float
    reason: str
    pinned: bool
    evidence: ReleaseEvidence
    version: int
    name: str
    def __init__(self, manifest: _Optional[bytes] = ..., state: _Optional[_Union[ReleaseState, str]] = ..., share: _Optional[float] = ..., since_unix: _Optional[float] = ..., reason: _Optional[str] = ..., pinned: bool = ..., evidence: _Optional[_Union[ReleaseEvidence, _Mapping]] = ..., version: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class ReleaseTrack(_message.Message):
    __slots__ = ("weights", "newest", "releases", "revision")
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    NEWEST_FIELD_NUMBER: _ClassVar[int]
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    weights: str
    newest: int
    releases: _containers.RepeatedCompositeFieldContainer[Release]
    revision: int
    def __init__(self, weights: _Optional[str] = ..., newest: _Optional[int] = ..., releases: _Optional[_Iterable[_Union[Release, _Mapping]]] = ..., revision: _Optional[int] = ...) -> None: ...

class ReleaseTracks(_message.Message):
    __slots__ = ("tracks",)
    TRACKS_FIELD_NUMBER: _ClassVar[int]
    tracks: _containers.RepeatedCompositeFieldContainer[ReleaseTrack]
    def __init__(self, tracks: _Optional[_Iterable[_Union[ReleaseTrack, _Mapping]]] = ...) -> None: ...

class ListReleasesRequest(_message.Message):
    __slots__ = ("release",)
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    release: str
    def __init__(self, release: _Optional[str] = ...) -> None: ...

class ListReleasesResponse(_message.Message):
    __slots__ = ("releases", "serial")
    RELEASES_FIELD_NUMBER: _ClassVar[int]
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    releases: _containers.RepeatedCompositeFieldContainer[Release]
    serial: int
    def __init__(self, releases: _Optional[_Iterable[_Union[Release, _Mapping]]] = ..., serial: _Optional[int] = ...) -> None: ...

class UpdateReleaseRequest(_message.Message):
    __slots__ = ("release", "action", "manifest")
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    release: str
    action: ReleaseAction
    manifest: bytes
    def __init__(self, release: _Optional[str] = ..., action: _Optional[_Union[ReleaseAction, str]] = ..., manifest: _Optional[bytes] = ...) -> None: ...

class UpdateReleaseResponse(_message.Message):
    __slots__ = ("release",)
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    release: Release
    def __init__(self, release: _Optional[_Union[Release, _Mapping]] = ...) -> None: ...
