"""Calls the coordinator for a device: opens, resumes and closes sessions, and asks for draft releases.

None of these calls is on the way of a token.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from outrider.core.acceptance.calibrator import AcceptancePrior
from outrider.core.errors import Overloaded, Unavailable
from outrider.telemetry.traces import call_metadata
from outrider.wire.status import error_from_rpc
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc
from outrider.wire.v1.session_pb2 import TargetIdentity

_TIMEOUT_S = 5.0
_RECONNECT_TIMEOUT_S = 3.5
"""Longer than the longest back-off of a channel (wire.channels)."""
_LEAST_PAUSE_S = 0.1


@dataclass(frozen=True)
class Placement:
    """A session that the coordinator has opened."""

    session_id: str
    grants: tuple[pb.Grant, ...]
    """The primary's first, then the standby's."""
    target: TargetIdentity
    prior: AcceptancePrior | None = None
    """Acceptance of earlier sessions of the same draft release and traffic class; None where it is not known."""
    release_serial: int = 0
    """Serial as in ReleaseOffer; 0 if there are no releases."""

    @property
    def ticket(self) -> bytes:
        """The first grant's ticket; empty where there is no grant."""
        return self.grants[0].ticket if self.grants else b""


@dataclass(frozen=True)
class ReleaseOffer:
    """The draft release that the coordinator wants this device to use."""

    serial: int
    """Grows with every change of what is offered."""
    manifest: bytes = b""
    """Signed; empty for the verifier's own draft."""
    canary: bool = False
    """Whether only some devices are offered it yet."""
    base_url: str = ""
    """Prefix of relative URLs in the manifest; empty where there is none."""


class CoordinatorClient:
    """Calls a coordinator with the tenant's API key. Raises core errors.

    in_background: runs a coroutine beside the caller, and ignores its core errors.
    """

    def __init__(
        self, channel: grpc.aio.Channel, api_key: str | None, in_background: Callable[[Coroutine[Any, Any, None]], None]
    ) -> None:
        self._in_background = in_background
        self._stub = coordinator_pb2_grpc.CoordinatorStub(channel)  # type: ignore[no-untyped-call]
        self._metadata = ((("authorization", f"Bearer {api_key}"),) if api_key else ()) + call_metadata()

    async def open(
        self,
        target: str,
        prompt_tokens: int = 0,
        *,
        wait_s: float = 0.0,
        draft_release: str = "",
        traffic_class: str = "",
    ) -> Placement:
        """Place a session on a verifier that serves `target` ("": the cluster's only one).

        Acceptance is measured, and predicted, for sessions of the same draft release and traffic class.
        A cluster without room is asked again when it says, for at most `wait_s`; then Overloaded is raised. If the
        caller is cancelled while the coordinator answers, the session is closed once it is open.
        """
        request = pb.OpenSessionRequest(
            target=target, prompt_tokens=prompt_tokens, draft_release=draft_release, traffic_class=traffic_class
        )
        deadline = time.monotonic() + wait_s
        while True:
            try:
                answer = await self._open(request)
                return Placement(
                    answer.session_id, _grants(answer), answer.target, _prior(answer), answer.release_serial
                )
            except Overloaded as error:
                pause_s = max(error.retry_after_s, _LEAST_PAUSE_S)
                if not time.monotonic() + pause_s <= deadline:  # also where the pause is not a number
                    raise
            await asyncio.sleep(pause_s)

    async def resume(
        self, session_id: str, ticket: bytes, failed: Sequence[str], last_epoch: int
    ) -> tuple[pb.Grant, ...]:
        """Return new grants with greater epochs for a session whose verifiers failed.

        ticket: any of the session's. failed: ids of verifiers. last_epoch: the greatest epoch used.
        """
        request = pb.ResumeSessionRequest(
            session_id=session_id, ticket=ticket, failed_verifiers=failed, last_epoch=last_epoch
        )
        return _grants(await self._call(self._stub.ResumeSession, request))

    async def close(self, session_id: str, ticket: bytes) -> None:
        """Free the session's place before its lease ends."""
        request = pb.CloseSessionRequest(session_id=session_id, ticket=ticket)
        await self._call(self._stub.CloseSession, request)

    async def offer_release(self, weights_hash: str, device_id: str, in_use: str) -> ReleaseOffer:
        """Ask which draft release to use for the target with these weights.

        in_use: the release that this device drafts with, "" for none.
        """
        request = pb.OfferReleaseRequest(target=weights_hash, device_id=device_id, in_use=in_use)
        answer = await self._call(self._stub.OfferRelease, request)
        return ReleaseOffer(answer.serial, answer.manifest, answer.canary, answer.base_url)

    async def _open(self, request: pb.OpenSessionRequest) -> pb.OpenSessionResponse:
        try:
            return await self._open_once(request)
        except Unavailable as unreachable:
            # It may just have restarted: a channel that failed before does not even try until its back-off ends.
            try:
                return await self._open_once(request, timeout=_RECONNECT_TIMEOUT_S, wait_for_ready=True)
            except Unavailable:
                raise unreachable from None

    async def _open_once(self, request: pb.OpenSessionRequest, **options: Any) -> pb.OpenSessionResponse:
        opening = asyncio.create_task(self._call(self._stub.OpenSession, request, **options))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            self._in_background(self._close_opened(opening))
            raise

    async def _close_opened(self, opening: Awaitable[pb.OpenSessionResponse]) -> None:
        answer = await opening
        await self.close(answer.session_id, answer.primary.ticket)

    async def _call(self, method: Callable[..., Awaitable[Any]], request: object, **options: Any) -> Any:
        """Call a method of the coordinator. options: gRPC's, in place of the usual ones. Raises core errors."""
        try:
            return await method(request, **{"timeout": _TIMEOUT_S, "metadata": self._metadata, **options})
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error


def _grants(answer: pb.OpenSessionResponse) -> tuple[pb.Grant, ...]:
    return tuple(getattr(answer, name) for name in ("primary", "standby") if answer.HasField(name))


def _prior(answer: pb.OpenSessionResponse) -> AcceptancePrior | None:
    """Return the prior; None where its rates are not valid, since the session does not depend on them."""
    prior = answer.prior
    shares = prior.first_acceptance, prior.sibling_acceptance
    if not answer.HasField("prior") or not all(0.0 <= share <= 1.0 for share in shares):
        return None
    return AcceptancePrior(*shares, prior.observations)
