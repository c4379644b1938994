"""Call the coordinator for a device: open, resume and close sessions, and ask for draft releases.

A running session needs none of these calls, except to resume after its verifiers have failed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import grpc
from pydantic import SecretStr

from edge_agent.session.channels import Channels
from outrider.core.errors import OutriderError, Overloaded, Unavailable
from outrider.telemetry.traces import call_metadata
from outrider.wire.channels import proxy_of
from outrider.wire.status import error_from_rpc, is_unresolved
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc

_TIMEOUT_S = 5.0
RECONNECT_TIMEOUT_S = 2.8
"""How long a coordinator that may be restarting is waited for: over twice the longest back-off of a channel
(wire.channels), and not so long that those who ask for text take it for a hang."""
_LEAST_DELAY_S = 0.1
_ADVICE = (
    "start it, for example with `outrider up`, or give the address of one that runs with --coordinator or"
    " OUTRIDER_EDGE_COORDINATOR"
)


class CoordinatorClient:
    """Calls a coordinator with the tenant's API key. Raises core errors.

    in_background: starts a coroutine without waiting for it, and ignores its core errors.
    """

    def __init__(
        self,
        channels: Channels,
        address: str,
        in_background: Callable[[Coroutine[Any, Any, None]], object],
        *,
        tls: bool = False,
        api_key: SecretStr | None = None,
    ) -> None:
        self._channels = channels
        self._address = address
        self._in_background = in_background
        self._tls = tls
        self._peer = f"the coordinator at {address} (--coordinator)"
        self._key = (("authorization", f"Bearer {api_key.get_secret_value()}"),) if api_key else ()

    async def open(
        self,
        request: pb.OpenSessionRequest,
        *,
        wait_s: float = 0.0,
        look_s: float = 0.0,
        on_wait: Callable[[OutriderError], None] = lambda error: None,
        patient: bool = True,
    ) -> pb.OpenSessionResponse:
        """Open a session on a verifier.

        If the cluster is full, the call is retried after the delay that it asks for, for at most `wait_s` in all; then
        Overloaded is raised. look_s: likewise for a cluster that has no verifier at present, and for its coordinator if
        that goes meanwhile; then Unavailable is raised, with `waited`. on_wait: called with the reason of every wait,
        which says how long it has been. patient: whether a coordinator that cannot be reached is waited for, since it
        may be restarting; if it does not come back, Unavailable is raised, with `waited`. If the caller is cancelled
        during the call, the session is closed once it has been opened.
        """
        since, tries, was_absent = time.monotonic(), 0, False
        while True:
            try:
                return await (self._open(request) if patient else self._open_once(request))
            except (Overloaded, Unavailable) as error:
                absent = isinstance(error, Unavailable)
                if absent is not was_absent:  # a cluster that comes back may be full at first
                    since, tries = time.monotonic(), 0
                allowed_s = wait_s
                if absent:  # a coordinator that has not answered is waited for only if it had answered before
                    allowed_s = look_s if error.retry_after_s or tries else 0.0
                was_absent, tries, delay_s = absent, tries + 1, max(error.retry_after_s, _LEAST_DELAY_S)
                waited_s = time.monotonic() - since
                if tries > 1:
                    error.args = (f"{error} (asked {tries} times in {waited_s:.0f} s)",)
                if not waited_s + delay_s <= allowed_s:  # so that a NaN raises, too
                    if isinstance(error, Unavailable) and tries > 1:
                        error.waited = True
                    raise
                on_wait(error)
            await asyncio.sleep(delay_s)

    async def resume(self, request: pb.ResumeSessionRequest) -> pb.OpenSessionResponse:
        """Return new grants with greater epochs for a session whose verifiers failed."""
        placement: pb.OpenSessionResponse = await self._call("ResumeSession", request)
        return placement

    async def close(self, session_id: str, ticket: bytes) -> None:
        """Close the session, which frees its capacity before its lease expires."""
        request = pb.CloseSessionRequest(session_id=session_id, ticket=ticket)
        await self._call("CloseSession", request)

    async def release_offer(self, request: pb.OfferReleaseRequest) -> pb.OfferReleaseResponse:
        """Ask which draft release to use."""
        offer: pb.OfferReleaseResponse = await self._call("OfferRelease", request)
        return offer

    async def _open(self, request: pb.OpenSessionRequest) -> pb.OpenSessionResponse:
        begun = time.monotonic()
        try:
            return await self._open_once(request)
        except Unavailable as unreachable:
            if unreachable.retry_after_s or time.monotonic() - begun >= RECONNECT_TIMEOUT_S:
                raise  # it has answered, or has been waited for, and another try waits for longer
            # The coordinator may have just restarted: a channel that failed does not reconnect until its back-off ends.
            begun = time.monotonic()
            try:
                return await self._open_once(request, timeout=RECONNECT_TIMEOUT_S, wait_for_ready=True)
            except Unavailable:
                # Sooner, it has answered, and may have room later.
                unreachable.waited = time.monotonic() - begun >= RECONNECT_TIMEOUT_S
                raise unreachable from None

    async def _open_once(self, request: pb.OpenSessionRequest, **options: Any) -> pb.OpenSessionResponse:
        opening = asyncio.create_task(self._call("OpenSession", request, **options))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            self._in_background(self._close_opened(opening))
            raise

    async def _close_opened(self, opening: Awaitable[pb.OpenSessionResponse]) -> None:
        """Close the session that a cancelled caller opens; there is none if opening it fails."""
        try:
            reply = await opening
        except OutriderError:
            return
        await self.close(reply.session_id, reply.primary.ticket)

    async def _call(self, method: str, request: object, **options: Any) -> Any:
        """Call a method of the coordinator. options: of gRPC, which override the defaults. Raises core errors."""
        defaults = {
            "timeout": self._channels.timeout(self._address, _TIMEOUT_S),
            "metadata": (*self._key, *call_metadata()),
        }
        channel = self._channels.get(self._address, tls=self._tls)
        stub = coordinator_pb2_grpc.CoordinatorStub(channel)  # type: ignore[no-untyped-call]
        begun = time.monotonic()
        try:
            answer = await getattr(stub, method)(request, **{**defaults, **options})
            if not options:  # with them a coordinator that starts again was waited for
                self._channels.measured(self._address, time.monotonic() - begun, channel)
        except grpc.RpcError as error:
            code = getattr(error, "code", lambda: None)()
            if code is grpc.StatusCode.DEADLINE_EXCEEDED and not options:
                self._channels.silent(self._address, channel)
            if is_unresolved(error):
                self._channels.retire(channel)
            raise error_from_rpc(error, self._peer, proxy_of(self._address) or _ADVICE) from error
        if answer is None:  # from gRPC, for bytes that are no message
            raise Unavailable(f"{self._peer} answered what is no message; is it of another version?")
        return answer


def prior_of(reply: pb.OpenSessionResponse) -> pb.Prior | None:
    """Return the acceptance of earlier sessions of the same draft and class; None if it is not known or invalid."""
    rates = reply.prior.first_acceptance, reply.prior.sibling_acceptance
    return reply.prior if reply.HasField("prior") and all(0.0 <= rate <= 1.0 for rate in rates) else None
