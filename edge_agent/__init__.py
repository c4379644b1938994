"""The device: drafts ahead, streams guesses to a verifier, and delivers the target's own tokens.

`AsyncClient` and `Client` are the same client, for callers that await and for callers that block. Importing this loads
neither llama.cpp nor a tokenizer; both are loaded when a target is first used.
"""

from edge_agent.config import EdgeSettings
from edge_agent.sdk.blocking import Client
from edge_agent.sdk.blocking_stream import BlockingStream
from edge_agent.sdk.client import AsyncClient
from edge_agent.sdk.completion_stream import CompletionStream
from edge_agent.sdk.timeout import Timeout
from edge_agent.sdk.types import Chunk, Completion
from edge_agent.session.statistics import Statistics, Usage
from outrider.core.errors import (
    BadRequest,
    Draining,
    Fenced,
    InternalError,
    Killed,
    ModelRefused,
    NotFound,
    OutriderError,
    Overloaded,
    PermissionDenied,
    ProtocolViolation,
    TimedOut,
    Unauthenticated,
    Unavailable,
    VocabularyMismatch,
)
from outrider.wire.channels import ClientTls

__all__ = [
    "AsyncClient",
    "BadRequest",
    "BlockingStream",
    "Chunk",
    "Client",
    "ClientTls",
    "Completion",
    "CompletionStream",
    "Draining",
    "EdgeSettings",
    "Fenced",
    "InternalError",
    "Killed",
    "ModelRefused",
    "NotFound",
    "OutriderError",
    "Overloaded",
    "PermissionDenied",
    "ProtocolViolation",
    "Statistics",
    "TimedOut",
    "Timeout",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "VocabularyMismatch",
]
