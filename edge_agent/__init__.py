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
    "edge_agent.config": ("EdgeSettings",),
    "edge_agent.sdk.blocking": ("BlockingSkeleton", "BlockingStream", "Client"),
    "edge_agent.sdk.client": ("AsyncClient",),
    "edge_agent.sdk.generation": ("CompletionStream",),
    "edge_agent.sdk.skeleton": ("SkeletonStream",),
    "edge_agent.sdk.types": ("Chunk", "Completion", "Skeleton", "SkeletonPoint", "Timeout"),
    "edge_agent.session.statistics": ("Statistics", "Usage"),
    "outrider.wire.channels": ("ClientTls",),
}
"""The public names of each module; those that are missing here are errors, of outrider.core.errors."""


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = next((one for one, names in _MODULES.items() if name in names), "outrider.core.errors")
    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
