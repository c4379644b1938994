"""Run a process that serves many streams of gRPC: one thread for its connections, few and short collections."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from outrider.wire.event_loop import GrpcEventLoop

GRPC_EXPERIMENTS, ONE_POLLER = "GRPC_EXPERIMENTS", "-event_engine_listener"
"""gRPC's own environment variable, and the value that has the thread which takes its events read and write connections,
too. By default other threads do and hand each message over, at a seventh of the front's CPU time (grpcio 1.85)."""
COLLECT_AFTER = 2_000, 4
"""New objects that have the garbage collector look through them, and how often it does so before it looks through those
that stayed, too. Of floods of calls, which leave some 100 objects in cycles each, it so has little at a time."""

T = TypeVar("T")


def use_one_poller() -> None:
    """Set gRPC's experiments for this process and those that it starts, before gRPC is imported."""
    os.environ.setdefault(GRPC_EXPERIMENTS, ONE_POLLER)


def run_front(main: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Return what a coroutine returns that is made and run in an event loop of this process."""
    with asyncio.Runner(loop_factory=GrpcEventLoop) as runner:
        return runner.run(main())


def calm_garbage_collector() -> None:
    """Exempt what was imported, which would delay commits, and collect little at a time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)
