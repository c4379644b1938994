"""The coordinator as a device sees it: open, resume and close sessions, ask for a draft release. Off the token path."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from edge_agent.session.failover import Grants
from outrider.core.acceptance.calibrator import AcceptancePrior
from outrider.core.errors import Overloaded, Unavailable
from outrider.telemetry.traces import call_metadata
from outrider.wire.status import error_from_rpc
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc
from outrider.wire.v1.session_pb2 import TargetIdentity

_TIMEOUT_S = 5.0
_RETRY_S = 3.5
"""Longer than the longest back-off of a channel (wire.channels)."""
_LEAST_PAUSE_S = 0.1
_A = TypeVar("_A")


@dataclass(frozen=True)
class Workload:
    """What makes a tenant's sessions alike: verifiers measure how such ones do."""

    draft: str = ""
    """Release of the draft; empty where there is none."""
    traffic: str = ""
    """The application's label."""


@dataclass(frozen=True)
class Placement:
    """A session that was opened."""

    grants: Grants
    target: TargetIdentity
    measured: AcceptancePrior | None = None
    """None where nothing is known."""
    release_serial: int = 0
    """As in ReleaseOffer; 0 where there are no releases."""


@dataclass(frozen=True)
class ReleaseOffer:
    """Which draft release this device shall use."""

    serial: int
    """Grows with every change of what is to be had."""
    manifest: bytes = b""
    """Signed; empty: the verifier's own draft."""
    canary: bool = False
    """Not yet everybody's."""
    base_url: str = ""
    """What relative URLs in the manifest begin with; empty where there is none."""


ANY_WORKLOAD = Workload()
"""Any other session."""


InBackground = Callable[[Coroutine[Any, Any, None]], None]


class CoordinatorClient:
    """Calls the coordinator with the tenant's API key. Raises core errors.

    in_background: runs what nobody waits for, and forgives it core errors.
    """

    def __init__(self, channel: grpc.aio.Channel, api_key: str | None, in_background: InBackground) -> None:
        self._in_background = in_background
        self._stub = coordinator_pb2_grpc.CoordinatorStub(channel)  # type: ignore[no-untyped-call]
        self._metadata = ((("authorization", f"Bearer {api_key}"),) if api_key else ()) + call_metadata()

    async def open(
        self, target: str, prompt_tokens: int = 0, *, wait_s: float = 0.0, like: Workload = ANY_WORKLOAD
    ) -> Placement:
        """Place a session on a verifier that serves `target` ("": the cluster's only one).

        A cluster without room is asked again when it says, for at most `wait_s`; then Overloaded is raised. Whoever
        is cancelled while the coordinator answers has the session closed once it is open.
        """
        request = pb.OpenSessionRequest(
            target=target, prompt_tokens=prompt_tokens, draft_release=like.draft, traffic_class=like.traffic
        )
        until = time.monotonic() + wait_s
        while True:
            try:
                answer = await self._open_once(request)
                return Placement(_grants(answer), answer.target, _measured(answer), answer.release_serial)
            except Overloaded as error:
                pause_s = max(error.retry_after_s, _LEAST_PAUSE_S)
                if not time.monotonic() + pause_s <= until:  # also where the pause is no number
                    raise
            await asyncio.sleep(pause_s)

    async def _give_back(self, opening: Awaitable[pb.OpenSessionResponse]) -> None:
        placed = _grants(await opening)
        await self.close(placed.session_id, placed.ticket)

    async def _open_once(self, request: pb.OpenSessionRequest) -> pb.OpenSessionResponse:
        try:
            return await self._open(request, wait=False, timeout_s=_TIMEOUT_S)
        except Unavailable as unreachable:
            # It may just have restarted: a channel that failed before does not even try until its back-off ends.
            try:
                return await self._open(request, wait=True, timeout_s=_RETRY_S)
            except Unavailable:
                raise unreachable from None

    async def _open(self, request: pb.OpenSessionRequest, *, wait: bool, timeout_s: float) -> pb.OpenSessionResponse:
        call = self._stub.OpenSession(request, timeout=timeout_s, metadata=self._metadata, wait_for_ready=wait)
        opening: asyncio.Task[pb.OpenSessionResponse] = asyncio.create_task(self._call(call))
        try:
            return await asyncio.shield(opening)
        except asyncio.CancelledError:
            self._in_background(self._give_back(opening))
            raise

    async def resume(self, session_id: str, ticket: bytes, failed: Sequence[str], last_epoch: int) -> Grants:
        """New grants with greater epochs for a session whose verifiers are gone."""
        request = pb.ResumeSessionRequest(
            session_id=session_id, ticket=ticket, failed_verifiers=failed, last_epoch=last_epoch
        )
        return _grants(await self._call(self._stub.ResumeSession(request, timeout=_TIMEOUT_S, metadata=self._metadata)))

    async def close(self, session_id: str, ticket: bytes) -> None:
        """Give the session's seat back before its lease ends."""
        request = pb.CloseSessionRequest(session_id=session_id, ticket=ticket)
        await self._call(self._stub.CloseSession(request, timeout=_TIMEOUT_S, metadata=self._metadata))

    async def offer_release(self, weights_hash: str, device_id: str, in_use: str) -> ReleaseOffer:
        """For a target with these weights. in_use: the release that this device drafts with, "" for none."""
        request = pb.OfferReleaseRequest(target=weights_hash, device_id=device_id, in_use=in_use)
        answer = await self._call(self._stub.OfferRelease(request, timeout=_TIMEOUT_S, metadata=self._metadata))
        return ReleaseOffer(answer.serial, answer.manifest, answer.canary, answer.base_url)

    async def _call(self, call: Awaitable[_A]) -> _A:
        try:
            return await call
        except grpc.RpcError as error:
            raise error_from_rpc(error) from error


def _grants(answer: pb.OpenSessionResponse) -> Grants:
    granted = [answer.primary] if answer.HasField("primary") else []
    if answer.HasField("standby"):
        granted.append(answer.standby)
    return Grants(answer.session_id, tuple(granted))


def _measured(answer: pb.OpenSessionResponse) -> AcceptancePrior | None:
    """Rates that are none are as good as nothing: the session does not depend on them."""
    if not answer.HasField("prior") or not (0.0 <= answer.prior.first <= 1.0 and 0.0 <= answer.prior.sibling <= 1.0):
        return None
    return AcceptancePrior(answer.prior.first, answer.prior.sibling, answer.prior.observations)
