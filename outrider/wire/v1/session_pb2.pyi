from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Finish(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_NONE: _ClassVar[Finish]
    FINISH_EOS: _ClassVar[Finish]
    FINISH_LENGTH: _ClassVar[Finish]
    FINISH_CANCELLED: _ClassVar[Finish]
FINISH_NONE: Finish
FINISH_EOS: Finish
FINISH_LENGTH: Finish
FINISH_CANCELLED: Finish

class ClientMessage(_message.Message):
    __slots__ = ("append", "open", "cancel", "pong", "draft", "padding")
    APPEND_FIELD_NUMBER: _ClassVar[int]
    OPEN_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    append: Append
    open: Open
    cancel: Cancel
    pong: Pong
    draft: DraftInUse
    padding: bytes
    def __init__(self, append: _Optional[_Union[Append, _Mapping]] = ..., open: _Optional[_Union[Open, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ..., draft: _Optional[_Union[DraftInUse, _Mapping]] = ..., padding: _Optional[bytes] = ...) -> None: ...

class ServerMessage(_message.Message):
    __slots__ = ("commit", "opened", "directive", "ping", "release", "padding")
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    DIRECTIVE_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    PADDING_FIELD_NUMBER: _ClassVar[int]
    commit: Commit
    opened: Opened
    directive: Directive
    ping: Ping
    release: ReleaseNotice
    padding: bytes
    def __init__(self, commit: _Optional[_Union[Commit, _Mapping]] = ..., opened: _Optional[_Union[Opened, _Mapping]] = ..., directive: _Optional[_Union[Directive, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., release: _Optional[_Union[ReleaseNotice, _Mapping]] = ..., padding: _Optional[bytes] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "bias_id", "bias", "grammar", "typical")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    BIAS_ID_FIELD_NUMBER: _ClassVar[int]
    BIAS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    TYPICAL_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    bias_id: _containers.RepeatedScalarFieldContainer[int]
    bias: _containers.RepeatedScalarFieldContainer[float]
    grammar: str
    typical: TypicalAcceptance
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., bias_id: _Optional[_Iterable[int]] = ..., bias: _Optional[_Iterable[float]] = ..., grammar: _Optional[str] = ..., typical: _Optional[_Union[TypicalAcceptance, _Mapping]] = ...) -> None: ...

class TypicalAcceptance(_message.Message):
    __slots__ = ("epsilon", "delta")
    EPSILON_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    epsilon: float
    delta: float
    def __init__(self, epsilon: _Optional[float] = ..., delta: _Optional[float] = ...) -> None: ...

class Attach(_message.Message):
    __slots__ = ("epoch", "prompt", "tokens", "sampling", "max_tokens", "stop_token_ids", "ignore_eos", "logprobs", "min_tokens", "prompt_logprobs", "scored", "undrafted")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SCORED_FIELD_NUMBER: _ClassVar[int]
    UNDRAFTED_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    prompt: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    sampling: Sampling
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    logprobs: int
    min_tokens: int
    prompt_logprobs: int
    scored: int
    undrafted: bool
    def __init__(self, epoch: _Optional[int] = ..., prompt: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: bool = ..., logprobs: _Optional[int] = ..., min_tokens: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., scored: _Optional[int] = ..., undrafted: bool = ...) -> None: ...

class Open(_message.Message):
    __slots__ = ("session_id", "attach", "vocabulary_hash")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_HASH_FIELD_NUMBER: _ClassVar[int]
    session_id: str
    attach: Attach
    vocabulary_hash: bytes
    def __init__(self, session_id: _Optional[str] = ..., attach: _Optional[_Union[Attach, _Mapping]] = ..., vocabulary_hash: _Optional[bytes] = ...) -> None: ...

class DraftInUse(_message.Message):
    __slots__ = ("release",)
    RELEASE_FIELD_NUMBER: _ClassVar[int]
    release: str
    def __init__(self, release: _Optional[str] = ...) -> None: ...

class ReleaseNotice(_message.Message):
    __slots__ = ("serial",)
    SERIAL_FIELD_NUMBER: _ClassVar[int]
    serial: int
    def __init__(self, serial: _Optional[int] = ...) -> None: ...

class Append(_message.Message):
    __slots__ = ("first_id", "base", "up", "token", "idle", "epoch")
    FIRST_ID_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    UP_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    IDLE_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    first_id: int
    base: int
    up: _containers.RepeatedScalarFieldContainer[int]
    token: _containers.RepeatedScalarFieldContainer[int]
    idle: bool
    epoch: int
    def __init__(self, first_id: _Optional[int] = ..., base: _Optional[int] = ..., up: _Optional[_Iterable[int]] = ..., token: _Optional[_Iterable[int]] = ..., idle: bool = ..., epoch: _Optional[int] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("start", "logprob", "top_id", "top_logprob")
    START_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_ID_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    start: int
    logprob: _containers.RepeatedScalarFieldContainer[float]
    top_id: _containers.RepeatedScalarFieldContainer[int]
    top_logprob: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, start: _Optional[int] = ..., logprob: _Optional[_Iterable[float]] = ..., top_id: _Optional[_Iterable[int]] = ..., top_logprob: _Optional[_Iterable[float]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("epoch", "start", "token", "seen", "finish", "evaluated", "logprob", "top_id", "top_logprob", "prompt")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    SEEN_FIELD_NUMBER: _ClassVar[int]
    FINISH_FIELD_NUMBER: _ClassVar[int]
    EVALUATED_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_ID_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    start: int
    token: _containers.RepeatedScalarFieldContainer[int]
    seen: int
    finish: Finish
    evaluated: int
    logprob: _containers.RepeatedScalarFieldContainer[float]
    top_id: _containers.RepeatedScalarFieldContainer[int]
    top_logprob: _containers.RepeatedScalarFieldContainer[float]
    prompt: PromptLogprobs
    def __init__(self, epoch: _Optional[int] = ..., start: _Optional[int] = ..., token: _Optional[_Iterable[int]] = ..., seen: _Optional[int] = ..., finish: _Optional[_Union[Finish, str]] = ..., evaluated: _Optional[int] = ..., logprob: _Optional[_Iterable[float]] = ..., top_id: _Optional[_Iterable[int]] = ..., top_logprob: _Optional[_Iterable[float]] = ..., prompt: _Optional[_Union[PromptLogprobs, _Mapping]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class SessionLimits(_message.Message):
    __slots__ = ("nodes", "depth", "in_flight", "run_ahead", "children")
    NODES_FIELD_NUMBER: _ClassVar[int]
    DEPTH_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    RUN_AHEAD_FIELD_NUMBER: _ClassVar[int]
    CHILDREN_FIELD_NUMBER: _ClassVar[int]
    nodes: int
    depth: int
    in_flight: int
    run_ahead: int
    children: int
    def __init__(self, nodes: _Optional[int] = ..., depth: _Optional[int] = ..., in_flight: _Optional[int] = ..., run_ahead: _Optional[int] = ..., children: _Optional[int] = ...) -> None: ...

class Opened(_message.Message):
    __slots__ = ("epoch", "verifier_id", "limits", "directive", "vocabulary_size")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    VERIFIER_ID_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    DIRECTIVE_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    verifier_id: str
    limits: SessionLimits
    directive: Directive
    vocabulary_size: int
    def __init__(self, epoch: _Optional[int] = ..., verifier_id: _Optional[str] = ..., limits: _Optional[_Union[SessionLimits, _Mapping]] = ..., directive: _Optional[_Union[Directive, _Mapping]] = ..., vocabulary_size: _Optional[int] = ...) -> None: ...

class Directive(_message.Message):
    __slots__ = ("window_nodes", "window_depth", "nodes_per_step", "min_acceptance", "draft_wait_ms", "step_ms")
    WINDOW_NODES_FIELD_NUMBER: _ClassVar[int]
    WINDOW_DEPTH_FIELD_NUMBER: _ClassVar[int]
    NODES_PER_STEP_FIELD_NUMBER: _ClassVar[int]
    MIN_ACCEPTANCE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    window_nodes: int
    window_depth: int
    nodes_per_step: int
    min_acceptance: float
    draft_wait_ms: int
    step_ms: float
    def __init__(self, window_nodes: _Optional[int] = ..., window_depth: _Optional[int] = ..., nodes_per_step: _Optional[int] = ..., min_acceptance: _Optional[float] = ..., draft_wait_ms: _Optional[int] = ..., step_ms: _Optional[float] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("nonce", "rtt_ms", "heard", "engine_quiet_ms")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    RTT_MS_FIELD_NUMBER: _ClassVar[int]
    HEARD_FIELD_NUMBER: _ClassVar[int]
    ENGINE_QUIET_MS_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    rtt_ms: float
    heard: int
    engine_quiet_ms: int
    def __init__(self, nonce: _Optional[int] = ..., rtt_ms: _Optional[float] = ..., heard: _Optional[int] = ..., engine_quiet_ms: _Optional[int] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("nonce", "draft_ms")
    NONCE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MS_FIELD_NUMBER: _ClassVar[int]
    nonce: int
    draft_ms: float
    def __init__(self, nonce: _Optional[int] = ..., draft_ms: _Optional[float] = ...) -> None: ...

class TargetIdentity(_message.Message):
    __slots__ = ("name", "weights_hash", "tokenizer_hash", "dtype", "backend", "hardware")
    NAME_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    HARDWARE_FIELD_NUMBER: _ClassVar[int]
    name: str
    weights_hash: str
    tokenizer_hash: str
    dtype: str
    backend: str
    hardware: str
    def __init__(self, name: _Optional[str] = ..., weights_hash: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., dtype: _Optional[str] = ..., backend: _Optional[str] = ..., hardware: _Optional[str] = ...) -> None: ...

class Artifact(_message.Message):
    __slots__ = ("role", "name", "hash", "size")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    HASH_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    role: str
    name: str
    hash: str
    size: int
    def __init__(self, role: _Optional[str] = ..., name: _Optional[str] = ..., hash: _Optional[str] = ..., size: _Optional[int] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("verifier_id", "target", "artifacts", "vocabulary_size", "eos_token_ids", "max_sequence")
    VERIFIER_ID_FIELD_NUMBER: _ClassVar[int]
    TARGET_FIELD_NUMBER: _ClassVar[int]
    ARTIFACTS_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_SIZE_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    verifier_id: str
    target: TargetIdentity
    artifacts: _containers.RepeatedCompositeFieldContainer[Artifact]
    vocabulary_size: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_sequence: int
    def __init__(self, verifier_id: _Optional[str] = ..., target: _Optional[_Union[TargetIdentity, _Mapping]] = ..., artifacts: _Optional[_Iterable[_Union[Artifact, _Mapping]]] = ..., vocabulary_size: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., max_sequence: _Optional[int] = ...) -> None: ...

class FetchArtifactRequest(_message.Message):
    __slots__ = ("hash", "offset")
    HASH_FIELD_NUMBER: _ClassVar[int]
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    hash: str
    offset: int
    def __init__(self, hash: _Optional[str] = ..., offset: _Optional[int] = ...) -> None: ...

class ArtifactChunk(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...
