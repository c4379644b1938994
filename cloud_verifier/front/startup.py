"""Answer for the gRPC service while the target loads: refuse calls with how far loading is, and log it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import grpc

from cloud_verifier.front.inbound import Requests
from cloud_verifier.front.service import VerifierService
from outrider.core.errors import Unavailable
from outrider.wire.admission import Metadata
from outrider.wire.status import aborting
from outrider.wire.v1 import session_pb2, session_pb2_grpc

log = logging.getLogger(__name__)

RETRY_LOADING_S = 2.0
"""Seconds after which a device may ask again that was refused because the target is not ready."""
PROGRESS_EVERY_S = 1.0
"""The least time between two log lines about the same phase."""
REMIND_EVERY_S = 15.0
"""A phase that reports nothing for so long is logged again, with its duration."""

Context = grpc.aio.ServicerContext[Any, Any]


class StartupService(session_pb2_grpc.VerifierServicer):
    """Refuses calls until the engine is ready, and then passes them to the real service."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.service: VerifierService | None = None
        self.phase = "starting the engine"
        self._clock = clock
        self._began = clock()
        self._logged = float("-inf")

    def progress(self, text: str) -> None:
        """Note the phase of loading and, after a colon, its share. Phases are logged at once, shares now and then."""
        new = text.partition(":")[0] != self.phase.partition(":")[0]
        self.phase = text
        if new or self._clock() - self._logged >= PROGRESS_EVERY_S:
            self._log(text)

    async def remind(self) -> None:
        """Log a phase again that takes long, until cancelled."""
        while True:
            await asyncio.sleep(REMIND_EVERY_S)
            if self._clock() - self._logged >= REMIND_EVERY_S:
                self._log(f"still {self.phase}, {self._clock() - self._began:.0f} s after the start")

    async def admit(self, method: str, metadata: Metadata) -> str | None:
        """Return the tenant of a call with one request that may be read, by its ticket.

        Raises Unavailable while the target loads, and what refuses the ticket.
        """
        return await self._ready().admit(metadata)

    async def Describe(self, request: session_pb2.DescribeRequest, context: Context) -> session_pb2.DescribeResponse:
        async with aborting(context):
            return await self._ready().Describe(request, context)

    async def FetchArtifact(self, request: session_pb2.FetchArtifactRequest, context: Context) -> None:
        async with aborting(context):
            await self._ready().FetchArtifact(request, context)

    async def Session(self, requests: Requests, context: Context) -> None:
        async with aborting(context):
            await self._ready().Session(requests, context)

    def _ready(self) -> VerifierService:
        """Return the service. Raises Unavailable while the target loads."""
        if self.service is None:
            raise self._loading()
        return self.service

    def _loading(self) -> Unavailable:
        return Unavailable(f"this verifier is still loading: {self.phase}; try again", retry_after_s=RETRY_LOADING_S)

    def _log(self, text: str) -> None:
        self._logged = self._clock()
        log.info("%s", text)
