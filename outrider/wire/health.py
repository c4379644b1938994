"""Answer gRPC's health checks, so that those who watch neither take the place of work nor hold anything up.

The servicer of grpcio-health-checking waits with a lock while a watcher reads: one that does not read would stop every
change of status, and any number of them may watch for ever (grpcio-health-checking 1.85).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2

from outrider.core.errors import Overloaded, Unavailable
from outrider.wire.channels import WATCHERS
from outrider.wire.status import aborting
from outrider.wire.strangers import host_of
from outrider.wire.writes import write_within

WATCHERS_OF_HOST = 8
"""The same of one host."""
WATCH_S = 600.0
"""Seconds after which a Watch ends; who still wants it calls again."""
POLL_S = 0.5
"""Seconds within which a change of status is told."""
WRITE_S = 5.0
"""Seconds in which a watcher must take a status."""

_Context = grpc.aio.ServicerContext[Any, Any]


class HealthServicer(health.aio.HealthServicer):  # type: ignore[misc]  # the package has no types
    """Keeps the status of services. A bounded number of peers may watch it, for a bounded time."""

    def __init__(self) -> None:
        super().__init__()
        self._watchers: Counter[str] = Counter()
        """Calls of Watch by host."""

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: _Context) -> None:
        """Write the status of a service now and at each change, until the time of a watch is over."""
        async with aborting(context):
            with self._watching(host_of(context.peer())):
                unread = await self._tell(request.service, context)
            if unread is not None:
                await unread
                raise Unavailable(f"the status was not read within {WRITE_S} s; watch again")

    async def _tell(self, service: str, context: _Context) -> asyncio.Future[None] | None:
        """Write the status and its changes. Return the write of one that is not taken in time, else None at the end."""
        end, told = time.monotonic() + WATCH_S, None
        while time.monotonic() < end:
            status = self._server_status.get(service, health_pb2.HealthCheckResponse.SERVICE_UNKNOWN)
            if status != told:
                told = status
                answer = health_pb2.HealthCheckResponse(status=status)
                if (unread := await write_within(context, answer, WRITE_S)) is not None:
                    return unread
            await asyncio.sleep(POLL_S)
        return None

    @contextlib.contextmanager
    def _watching(self, host: str) -> Iterator[None]:
        """Count a watcher. Raises Overloaded if there are too many."""
        if self._watchers.total() >= WATCHERS or self._watchers[host] >= WATCHERS_OF_HOST:
            raise Overloaded(
                f"{WATCHERS_OF_HOST} calls of one host and {WATCHERS} in all may watch the health at once; call"
                " Check instead",
                retry_after_s=WATCH_S,
            )
        self._watchers[host] += 1
        try:
            yield
        finally:
            self._watchers[host] -= 1
            if not self._watchers[host]:
                del self._watchers[host]
