"""The verifier's place in the cluster: a lease at the coordinator, renewed by a report a second.

Control is off the token path: while the coordinator is away, live sessions go on and tickets are still verified with
the keys that it last gave.
"""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time

import grpc

from outrider.core.errors import Unauthenticated
from outrider.wire import ticket
from outrider.wire.channels import ClientTls, channel
from outrider.wire.status import error_from_rpc
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 3.0
RETRY_S = 1.0
CLOCK_SKEW_S = 5.0


class Registration:
    """Registers, reports, and registers again whenever the coordinator does not know this verifier."""

    def __init__(
        self,
        coordinator: str,
        request: pb.RegisterRequest,
        *,
        join_token: str = "",
        tls: ClientTls | None = None,
        insecure: bool = False,
    ) -> None:
        self._request = request
        self._request.instance = secrets.randbits(63)
        self._metadata = (("authorization", f"Bearer {join_token}"),) if join_token else ()
        self._channel = channel(coordinator, tls=tls, insecure=insecure)
        self._stub = coordinator_pb2_grpc.RegistryStub(self._channel)  # type: ignore[no-untyped-call]
        self._coordinator = coordinator
        self._interval_s = 1.0
        self._public_keys: dict[str, bytes] = {}

    def authorise(self, ticket_bytes: bytes) -> ticket.Claims:
        """What a ticket allows here. Raises Unauthenticated or PermissionDenied."""
        if not self._public_keys:
            raise Unauthenticated("this verifier has not yet reached its coordinator and knows no keys; try again")
        return ticket.verify(
            ticket_bytes,
            self._public_keys,
            audience=self._request.verifier_id,
            now=time.time(),
            grace_s=CLOCK_SKEW_S,
        )

    async def register(self) -> None:
        """Take the lease, trying until it is granted. Raises only what trying again cannot mend."""
        while True:
            try:
                answer = await self._stub.Register(self._request, timeout=CALL_TIMEOUT_S, metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                reason = error_from_rpc(error)
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
                    raise reason from error
                log.warning("the coordinator at %s is not there yet: %s", self._coordinator, reason)
                await asyncio.sleep(RETRY_S * random.uniform(0.5, 1.5))
                continue
            self._interval_s = max(0.1, answer.report_interval_ms / 1000)
            self._public_keys = dict(answer.public_keys)
            return

    async def report(self, request: pb.ReportRequest) -> None:
        """One report. Registers again if the lease was lost; a coordinator that is away is not an error."""
        request.verifier_id = self._request.verifier_id
        request.instance = self._request.instance
        try:
            answer = await self._stub.Report(request, timeout=CALL_TIMEOUT_S, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            log.warning("report not delivered: %s", error_from_rpc(error))
            return
        if answer.public_keys:
            self._public_keys = dict(answer.public_keys)
        if not answer.known:
            log.info("the coordinator does not know this verifier; registering again")
            await self.register()

    async def pause(self) -> None:
        """Until the next report is due."""
        await asyncio.sleep(self._interval_s)

    async def close(self) -> None:
        """Give the lease back, if the coordinator is there to take it."""
        request = pb.DeregisterRequest(verifier_id=self._request.verifier_id, instance=self._request.instance)
        try:
            await self._stub.Deregister(request, timeout=1.0, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            log.info("not deregistered, the lease will end by itself: %s", error_from_rpc(error))
        await self._channel.close()
