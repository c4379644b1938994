"""Fake a coordinator that always names the same verifiers: a real grpc.aio server on a socket around a list."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import grpc
from fake_verifier import FakeVerifier
from ports import unused_port

from outrider.core.errors import OutriderError
from outrider.core.protocol.messages import SessionLimits
from outrider.wire.channels import bind, server
from outrider.wire.status import abort
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc


class FakeCoordinator(coordinator_pb2_grpc.CoordinatorServicer):
    """Serve `verifiers`, as an async context manager; `address` is where it listens. Fields may change meanwhile."""

    def __init__(self, *verifiers: FakeVerifier) -> None:
        self.verifiers: Sequence[FakeVerifier] = verifiers
        """The primary, then the standby."""
        self.after_resume: Sequence[FakeVerifier] = verifiers
        self.refuse: OutriderError | None = None
        """The answer to OpenSession."""
        self.answering = asyncio.Event()
        self.answering.set()
        """While it is cleared, OpenSession hangs."""
        self.opened = 0
        self.asked: list[pb.OpenSessionRequest] = []
        self.prior: pb.Prior | None = None
        self.resumed: list[tuple[str, ...]] = []
        self.closed: list[str] = []
        self.address = ""
        self._server: grpc.aio.Server | None = None

    async def __aenter__(self) -> FakeCoordinator:
        self._server = server()
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{bind(self._server, f'127.0.0.1:{unused_port()}')}"
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._server is not None:
            await self._server.stop(0)

    async def OpenSession(self, request: pb.OpenSessionRequest, context: Any) -> pb.OpenSessionResponse:
        self.opened += 1
        self.asked.append(request)
        session_id = f"session-{self.opened}"
        await self.answering.wait()
        if self.refuse is not None:
            await abort(context, self.refuse)
        granted = self._granted(session_id, self.verifiers, 1)
        if self.prior is not None:
            granted.prior.CopyFrom(self.prior)
        return granted

    async def ResumeSession(self, request: pb.ResumeSessionRequest, context: Any) -> pb.OpenSessionResponse:
        self.resumed.append(tuple(request.failed_verifiers))
        return self._granted(request.session_id, self.after_resume, request.last_epoch + 1)

    async def CloseSession(self, request: pb.CloseSessionRequest, context: Any) -> pb.CloseSessionResponse:
        self.closed.append(request.session_id)
        return pb.CloseSessionResponse()

    def _granted(self, session_id: str, among: Sequence[FakeVerifier], epoch: int) -> pb.OpenSessionResponse:
        """Grant a session ten epochs at each verifier."""
        grants = [
            pb.Grant(
                verifier_id=verifier.verifier_id,
                address=verifier.address,
                ticket=b"ticket of " + session_id.encode(),
                limits=SessionLimits().message,
                epoch_first=epoch + 10 * i,
                epoch_last=epoch + 10 * i + 9,
            )
            for i, verifier in enumerate(among)
        ]
        return pb.OpenSessionResponse(
            session_id=session_id, primary=grants[0], standby=grants[1] if len(grants) > 1 else None
        )
