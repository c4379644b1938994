from outrider.wire.v1 import session_pb2 as _session_pb2
from outrider.wire.v1 import telemetry_pb2 as _telemetry_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EngineRequest(_message.Message):
    __slots__ = ("session_id", "append", "start", "cancel", "stop", "update", "quit", "draft", "epoch")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    APPEND_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    UPDATE_FIELD_NUMBER: _ClassVar[int]
    QUIT_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    append: _session_pb2.Append
    start: Start
    cancel: _session_pb2.Cancel
    stop: Stop
    update: SessionUpdate
    quit: Quit
    draft: _session_pb2.DraftInUse
    epoch: int
    def __init__(self, session_id: _Optional[str] = ..., append: _Optional[_Union[_session_pb2.Append, _Mapping]] = ..., start: _Optional[_Union[Start, _Mapping]] = ..., cancel: _Optional[_Union[_session_pb2.Cancel, _Mapping]] = ..., stop: _Optional[_Union[Stop, _Mapping]] = ..., update: _Optional[_Union[SessionUpdate, _Mapping]] = ..., quit: _Optional[_Union[Quit, _Mapping]] = ..., draft: _Optional[_Union[_session_pb2.DraftInUse, _Mapping]] = ..., epoch: _Optional[int] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("attach", "limits", "directive", "salt", "record", "draft_release")
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    DIRECTIVE_FIELD_NUMBER: _ClassVar[int]
    SALT_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    DRAFT_RELEASE_FIELD_NUMBER: _ClassVar[int]
    attach: _session_pb2.Attach
    limits: _session_pb2.SessionLimits
    directive: _session_pb2.Directive
    salt: str
    record: bool
    draft_release: str
    def __init__(self, attach: _Optional[_Union[_session_pb2.Attach, _Mapping]] = ..., limits: _Optional[_Union[_session_pb2.SessionLimits, _Mapping]] = ..., directive: _Optional[_Union[_session_pb2.Directive, _Mapping]] = ..., salt: _Optional[str] = ..., record: bool = ..., draft_release: _Optional[str] = ...) -> None: ...

class Stop(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SessionUpdate(_message.Message):
    __slots__ = ("rtt_ms", "directive")
    RTT_MS_FIELD_NUMBER: _ClassVar[int]
    DIRECTIVE_FIELD_NUMBER: _ClassVar[int]
    rtt_ms: float
    directive: _session_pb2.Directive
    def __init__(self, rtt_ms: _Optional[float] = ..., directive: _Optional[_Union[_session_pb2.Directive, _Mapping]] = ...) -> None: ...

class Quit(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EngineEvent(_message.Message):
    __slots__ = ("session_id", "epoch", "commit", "failure", "stats", "ready", "progress", "recorded", "alive")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    RECORDED_FIELD_NUMBER: _ClassVar[int]
    ALIVE_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    epoch: int
    commit: _session_pb2.Commit
    failure: EngineFailure
    stats: EngineStats
    ready: EngineReady
    progress: EngineProgress
    recorded: RecordedTokens
    alive: Alive
    def __init__(self, session_id: _Optional[str] = ..., epoch: _Optional[int] = ..., commit: _Optional[_Union[_session_pb2.Commit, _Mapping]] = ..., failure: _Optional[_Union[EngineFailure, _Mapping]] = ..., stats: _Optional[_Union[EngineStats, _Mapping]] = ..., ready: _Optional[_Union[EngineReady, _Mapping]] = ..., progress: _Optional[_Union[EngineProgress, _Mapping]] = ..., recorded: _Optional[_Union[RecordedTokens, _Mapping]] = ..., alive: _Optional[_Union[Alive, _Mapping]] = ...) -> None: ...

class Alive(_message.Message):
    __slots__ = ("expected_s",)
    EXPECTED_S_FIELD_NUMBER: _ClassVar[int]
    expected_s: float
    def __init__(self, expected_s: _Optional[float] = ...) -> None: ...

class RecordedTokens(_message.Message):
    __slots__ = ("start", "token", "top", "top_ids", "top_log_probs", "tail", "proposed_depths", "draft_release")
    START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    TAIL_FIELD_NUMBER: _ClassVar[int]
    PROPOSED_DEPTHS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_RELEASE_FIELD_NUMBER: _ClassVar[int]
    start: int
    token: _containers.RepeatedScalarFieldContainer[int]
    top: int
    top_ids: bytes
    top_log_probs: bytes
    tail: bytes
    proposed_depths: bytes
    draft_release: str
    def __init__(self, start: _Optional[int] = ..., token: _Optional[_Iterable[int]] = ..., top: _Optional[int] = ..., top_ids: _Optional[bytes] = ..., top_log_probs: _Optional[bytes] = ..., tail: _Optional[bytes] = ..., proposed_depths: _Optional[bytes] = ..., draft_release: _Optional[str] = ...) -> None: ...

class EngineFailure(_message.Message):
    __slots__ = ("kind", "message", "field", "retry_after_s")
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    FIELD_FIELD_NUMBER: _ClassVar[int]
    RETRY_AFTER_S_FIELD_NUMBER: _ClassVar[int]
    kind: str
    message: str
    field: str
    retry_after_s: float
    def __init__(self, kind: _Optional[str] = ..., message: _Optional[str] = ..., field: _Optional[str] = ..., retry_after_s: _Optional[float] = ...) -> None: ...

class EngineProgress(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class EngineReady(_message.Message):
    __slots__ = ("target", "vocabulary_size", "eos_token_ids", "max_sequence", "chains_only")
    TARGET_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CHAINS_ONLY_FIELD_NUMBER: _ClassVar[int]
    target: _session_pb2.TargetIdentity
    vocabulary_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_sequence: int
    chains_only: bool
    def __init__(self, target: _Optional[_Union[_session_pb2.TargetIdentity, _Mapping]] = ..., vocabulary_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., max_sequence: _Optional[int] = ..., chains_only: bool = ...) -> None: ...

class EngineStats(_message.Message):
    __slots__ = ("verifier", "sessions", "kv_cached", "kv_reserved", "unrecorded", "counters")
    VERIFIER_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    KV_CACHED_FIELD_NUMBER: _ClassVar[int]
    KV_RESERVED_FIELD_NUMBER: _ClassVar[int]
    UNRECORDED_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    verifier: _telemetry_pb2.VerifierTelemetry
    sessions: _containers.RepeatedCompositeFieldContainer[_telemetry_pb2.SessionTelemetry]
    kv_cached: int
    kv_reserved: int
    unrecorded: int
    counters: EngineCounters
    def __init__(self, verifier: _Optional[_Union[_telemetry_pb2.VerifierTelemetry, _Mapping]] = ..., sessions: _Optional[_Iterable[_Union[_telemetry_pb2.SessionTelemetry, _Mapping]]] = ..., kv_cached: _Optional[int] = ..., kv_reserved: _Optional[int] = ..., unrecorded: _Optional[int] = ..., counters: _Optional[_Union[EngineCounters, _Mapping]] = ...) -> None: ...

class Histogram(_message.Message):
    __slots__ = ("counts", "sum")
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    SUM_FIELD_NUMBER: _ClassVar[int]
    counts: _containers.RepeatedScalarFieldContainer[int]
    sum: float
    def __init__(self, counts: _Optional[_Iterable[int]] = ..., sum: _Optional[float] = ...) -> None: ...

class EngineCounters(_message.Message):
    __slots__ = ("steps", "committed", "prefilled", "drafts", "evaluated", "accepted", "accepted_by_position", "server_evaluated", "server_accepted", "dead", "ignored", "part_s", "step_s", "rows", "first_token_s", "token_s", "queue_s", "sessions", "prefix_hits", "prefix_tokens", "lossy", "sources")
    class PartSEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class SessionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class SourcesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: SourceCounts
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[SourceCounts, _Mapping]] = ...) -> None: ...
    STEPS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    PREFILLED_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    SERVER_EVALUATED_FIELD_NUMBER: _ClassVar[int]
    SERVER_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    DEAD_FIELD_NUMBER: _ClassVar[int]
    IGNORED_FIELD_NUMBER: _ClassVar[int]
    PART_S_FIELD_NUMBER: _ClassVar[int]
    STEP_S_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_S_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_HITS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOSSY_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    steps: int
    committed: int
    prefilled: int
    drafts: int
    evaluated: int
    accepted: int
    accepted_by_position: _containers.RepeatedScalarFieldContainer[int]
    server_evaluated: int
    server_accepted: int
    dead: int
    ignored: int
    part_s: _containers.ScalarMap[str, float]
    step_s: Histogram
    rows: Histogram
    first_token_s: Histogram
    token_s: Histogram
    queue_s: Histogram
    sessions: _containers.ScalarMap[str, int]
    prefix_hits: int
    prefix_tokens: int
    lossy: SpeculationCounts
    sources: _containers.MessageMap[str, SourceCounts]
    def __init__(self, steps: _Optional[int] = ..., committed: _Optional[int] = ..., prefilled: _Optional[int] = ..., drafts: _Optional[int] = ..., evaluated: _Optional[int] = ..., accepted: _Optional[int] = ..., accepted_by_position: _Optional[_Iterable[int]] = ..., server_evaluated: _Optional[int] = ..., server_accepted: _Optional[int] = ..., dead: _Optional[int] = ..., ignored: _Optional[int] = ..., part_s: _Optional[_Mapping[str, float]] = ..., step_s: _Optional[_Union[Histogram, _Mapping]] = ..., rows: _Optional[_Union[Histogram, _Mapping]] = ..., first_token_s: _Optional[_Union[Histogram, _Mapping]] = ..., token_s: _Optional[_Union[Histogram, _Mapping]] = ..., queue_s: _Optional[_Union[Histogram, _Mapping]] = ..., sessions: _Optional[_Mapping[str, int]] = ..., prefix_hits: _Optional[int] = ..., prefix_tokens: _Optional[int] = ..., lossy: _Optional[_Union[SpeculationCounts, _Mapping]] = ..., sources: _Optional[_Mapping[str, SourceCounts]] = ...) -> None: ...

class SpeculationCounts(_message.Message):
    __slots__ = ("committed", "drafts", "evaluated", "accepted", "accepted_by_position")
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    committed: int
    drafts: int
    evaluated: int
    accepted: int
    accepted_by_position: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, committed: _Optional[int] = ..., drafts: _Optional[int] = ..., evaluated: _Optional[int] = ..., accepted: _Optional[int] = ..., accepted_by_position: _Optional[_Iterable[int]] = ...) -> None: ...

class SourceCounts(_message.Message):
    __slots__ = ("evaluated", "accepted")
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    evaluated: int
    accepted: int
    def __init__(self, evaluated: _Optional[int] = ..., accepted: _Optional[int] = ...) -> None: ...
