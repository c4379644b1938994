"""What a verifier is while it loads: it answers health checks, says how far it is, and refuses everything else."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from cloud_verifier.front.service import VerifierService
from outrider.core.errors import Unavailable
from outrider.wire.status import abort, aborting
from outrider.wire.v1 import session_pb2, session_pb2_grpc

log = logging.getLogger(__name__)

RETRY_LOADING_S = 2.0
"""When somebody may ask again who was refused because the target is not ready."""
PROGRESS_EVERY_S = 1.0
"""The least time between two lines about the same phase."""
STILL_EVERY_S = 15.0
"""A phase that says nothing for so long is logged again, with its duration."""

Context = grpc.aio.ServicerContext[Any, Any]
Requests = AsyncIterator[session_pb2.ClientMessage]


class Progress:
    """The phase of loading, for the log and for those who ask too early."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._logged = float("-inf")
        self._kind = ""
        self.phase = "starting the engine"

    def __call__(self, text: str) -> None:
        """`text`: the phase, and after a colon how far it is. A new phase is logged at once, a share now and then."""
        kind = text.partition(":")[0]
        self.phase = text
        if kind != self._kind or self._clock() - self._logged >= PROGRESS_EVERY_S:
            self._log(text)
        self._kind = kind

    async def still(self) -> None:
        """Remind of a long phase, for ever."""
        while True:
            await asyncio.sleep(STILL_EVERY_S)
            if self._clock() - self._logged >= STILL_EVERY_S:
                self._log(f"still {self.phase}, {self._clock() - self._began:.0f} s after the start")

    def _log(self, text: str) -> None:
        self._logged = self._clock()
        log.info("%s", text)


class Gate(session_pb2_grpc.VerifierServicer):
    """Stands before the service, which exists once the engine is ready."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.service: VerifierService | None = None

    async def Describe(self, request: session_pb2.DescribeRequest, context: Context) -> session_pb2.DescribeResponse:
        async with aborting(context):
            return await self._ready().Describe(request, context)

    async def FetchArtifact(self, request: session_pb2.FetchArtifactRequest, context: Context) -> None:
        async with aborting(context):
            await self._ready().FetchArtifact(request, context)

    async def Session(self, requests: Requests, context: Context) -> AsyncIterator[session_pb2.ServerMessage]:
        try:
            service = self._ready()
        except Unavailable as error:
            await abort(context, error)
        async with contextlib.aclosing(service.Session(requests, context)) as messages:
            async for message in messages:
                yield message

    def _ready(self) -> VerifierService:
        if self.service is None:
            raise Unavailable(
                f"this verifier is still loading: {self._progress.phase}; try again", retry_after_s=RETRY_LOADING_S
            )
        return self.service
