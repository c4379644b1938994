"""Run on a device: draft tokens ahead, stream them to a verifier, and deliver the tokens of the target.

`AsyncClient` is for asynchronous code, and `Client` is the same client for synchronous code. Importing the package
imports none of its modules: each name is imported when it is first used, which keeps `outrider-edge --help` fast.
llama.cpp and the tokenizer are loaded when a target is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edge_agent.config import EdgeSettings
    from edge_agent.sdk.blocking import BlockingSkeleton, BlockingStream, Client
    from edge_agent.sdk.client import AsyncClient
    from edge_agent.sdk.generation import CompletionStream
    from edge_agent.sdk.skeleton import SkeletonStream
    from edge_agent.sdk.types import Chunk, Completion, Skeleton, SkeletonPoint, Timeout
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
    "BlockingSkeleton",
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
    "Skeleton",
    "SkeletonPoint",
    "SkeletonStream",
    "Statistics",
    "TimedOut",
    "Timeout",
    "Unauthenticated",
    "Unavailable",
    "Usage",
    "VocabularyMismatch",
]

_MODULES = {
    "AsyncClient": "edge_agent.sdk.client",
    "BlockingSkeleton": "edge_agent.sdk.blocking",
    "BlockingStream": "edge_agent.sdk.blocking",
    "Chunk": "edge_agent.sdk.types",
    "Client": "edge_agent.sdk.blocking",
    "ClientTls": "outrider.wire.channels",
    "Completion": "edge_agent.sdk.types",
    "CompletionStream": "edge_agent.sdk.generation",
    "EdgeSettings": "edge_agent.config",
    "Skeleton": "edge_agent.sdk.types",
    "SkeletonPoint": "edge_agent.sdk.types",
    "SkeletonStream": "edge_agent.sdk.skeleton",
    "Statistics": "edge_agent.session.statistics",
    "Timeout": "edge_agent.sdk.types",
    "Usage": "edge_agent.session.statistics",
}
"""The module of each public name; names that are missing here are errors, of outrider.core.errors."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_MODULES.get(name, "outrider.core.errors")), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
