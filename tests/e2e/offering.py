"""A coordinator of one verifier that offers one draft release: enough of one for devices that update their draft."""

from __future__ import annotations

import itertools
from typing import Any

import grpc

from outrider.wire.channels import bind, server
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc


class Offering(coordinator_pb2_grpc.CoordinatorServicer):
    """Use as an async context manager; `address` is where it listens. The verifier must serve without tickets."""

    def __init__(self, verifier: str) -> None:
        self._verifier = verifier
        self._numbers = itertools.count(1)
        self.offer = pb.OfferReleaseResponse()
        self.address = ""
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> Offering:
        self._server = server()
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{bind(self._server, '127.0.0.1:0')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            await self._server.stop(0)

    async def OpenSession(self, request: pb.OpenSessionRequest, context: Any) -> pb.OpenSessionResponse:
        grant = pb.Grant(verifier_id="alone", address=self._verifier, epoch_first=1, epoch_last=1000)
        name = f"offered-{next(self._numbers)}"
        return pb.OpenSessionResponse(session_id=name, primary=grant, release_serial=self.offer.serial)

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Any) -> pb.CloseSessionResponse:
        return pb.CloseSessionResponse()

    async def OfferRelease(self, request: pb.OfferReleaseRequest, context: Any) -> pb.OfferReleaseResponse:
        return self.offer
