"""Hold the verifier's lease at the coordinator: register, renew it by a report a second, and give it back.

Control is off the token path: while the coordinator is away, live sessions go on and tickets are still verified with
the keys that it last gave.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Iterator
from typing import Any

import cryptography  # noqa: F401  # verifies tickets; imported here, so that the start fails without it
import grpc

from cloud_verifier.config import VerifierConfig
from cloud_verifier.front.counters import FrontCounters
from cloud_verifier.front.revocations import CLOCK_SKEW_S, Revocations
from outrider.core.backoff import backoff_s
from outrider.core.errors import BadRequest, OutriderError, Overloaded, Unavailable
from outrider.core.protocol.messages import Directive
from outrider.core.text import short_id
from outrider.telemetry.logs import RepeatedFailure
from outrider.wire import local_tokens, ticket
from outrider.wire.channels import channel, proxy_of
from outrider.wire.checks import check_directive
from outrider.wire.status import error_from_rpc, is_unresolved
from outrider.wire.telemetry import WRONG_CLOCK_S
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 3.0
FIRST_RETRY_S, RETRY_S = 0.1, 1.5  # the first pause and the longest one; up to half is taken off at random
SOONEST = 0.1
"""Least share of the report interval between two reports, however often one is hurried."""


def join_token(config: VerifierConfig) -> str:
    """Return the join token of the settings, or of `outrider up` on this machine; "" for none. Raises BadRequest."""
    given = config.join_token.get_secret_value()
    return given or (local_tokens.find(local_tokens.JOIN, config.coordinator) if config.coordinator else "")


class RegistryClient:
    """Registers the verifier, reports, and registers again whenever the coordinator does not know it."""

    def __init__(self, config: VerifierConfig, request: pb.RegisterRequest, counters: FrontCounters) -> None:
        self._config = config
        self._counters = counters
        self._request = request
        self._request.instance = secrets.randbits(63)
        self._channel = self._connect()
        self._coordinator = config.coordinator
        self._interval_s = 1.0
        self._public_keys: dict[str, bytes] = {}
        self.revocations = Revocations()
        self.release_serial = 0
        """Serial of the draft releases by the last report's answer (ReleaseNotice); 0 if there are none."""
        self._hurried = asyncio.Event()
        """Set when the next report must not wait for its interval."""
        self._answered = False
        """Whether the last report was answered."""
        self._failure = RepeatedFailure(log, "the coordinator takes reports again")
        self.clock_ahead_s = 0.0
        """Seconds by which this machine's clock is ahead of the coordinator's, by its last answer."""
        self._clocks = RepeatedFailure(log, "this machine's clock agrees with the coordinator's again")

    def _connect(self) -> grpc.aio.Channel:
        return channel(self._config.coordinator, tls=self._config.coordinator_tls, insecure=self._config.insecure)

    async def authorise(self, ticket_bytes: bytes) -> ticket.Claims:
        """Return what a ticket allows here. Raises Unauthenticated, PermissionDenied or Killed.

        A key that is unknown here is never asked for: coordinators tell the next one before they sign with it.
        """
        claims = ticket.verify(
            ticket_bytes,
            self._public_keys,
            audience=self._request.verifier_id,
            now=self._now(),
            grace_s=CLOCK_SKEW_S,
        )
        self.revocations.check(claims)
        return claims

    async def register(self) -> None:
        """Take the lease, trying until it is granted. Raises only errors that trying again cannot mend."""
        failures = 0
        while True:
            try:
                return await self._register()
            except (Unavailable, Overloaded) as error:
                failures += 1
                log.warning("the coordinator at %s is not there yet: %s", self._coordinator, error)
                await asyncio.sleep(backoff_s(failures, FIRST_RETRY_S, RETRY_S))

    async def report(self, request: pb.ReportRequest) -> pb.ReportResponse:
        """Report, and return the coordinator's answer; register again if the lease was lost.

        If the coordinator cannot be reached, or refuses, the answer is empty.
        """
        self._hurried.clear()
        begun = time.perf_counter()
        try:
            answer = await self._report(request)
            self._counters.reports += 1
            self._answered = True
            self._failure.worked()
            return answer
        except OutriderError as error:
            self._counters.reports_failed += 1
            if self._answered:  # it may be that one coordinator has died, and others take reports
                self._answered = False
                self.hurry()
            self._failure.failed("report not delivered: %s; trying again every %g s", error, self._interval_s)
            return pb.ReportResponse()
        finally:
            self._counters.report_s.add(time.perf_counter() - begun)

    async def pause(self) -> None:
        """Return when the next report is due: after the interval, or sooner after `hurry`."""
        soonest = self._interval_s * SOONEST
        await asyncio.sleep(soonest)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._interval_s - soonest):
                await self._hurried.wait()

    def hurry(self) -> None:
        """Send the next report without waiting for its interval, as the coordinator should know of a change."""
        self._hurried.set()

    async def _register(self) -> None:
        answer = await self._call("Register", self._request)
        self._interval_s = max(0.1, answer.report_interval_ms / 1000)
        self._public_keys = dict(answer.public_keys)

    async def _report(self, request: pb.ReportRequest) -> pb.ReportResponse:
        request.verifier_id = self._request.verifier_id
        request.instance = self._request.instance
        request.revocations_seen = self.revocations.seen
        answer: pb.ReportResponse = await self._call("Report", request)
        if answer.public_keys:
            self._public_keys = dict(answer.public_keys)
        self.revocations.learn(answer, self._now())
        self.release_serial = answer.release_serial
        if not answer.known:
            log.info("the coordinator does not know this verifier; registering again")
            await self._register()
        return answer

    async def _call(self, method: str, request: Any) -> Any:
        peer = f"the coordinator at {self._coordinator} (--coordinator)"
        sent_at = time.time()
        try:
            answer = await getattr(self._stub, method)(request, timeout=CALL_TIMEOUT_S, metadata=self._metadata())
        except grpc.aio.AioRpcError as error:
            if is_unresolved(error):
                await self._channel.close()
                self._channel = self._connect()
            raise error_from_rpc(error, peer, proxy_of(self._coordinator)) from error
        if answer is None:  # from gRPC, for bytes that are no message
            raise Unavailable(f"{peer} answered what is no message; is it of another version?")
        self._compare_clocks((sent_at + time.time()) / 2, answer.unix)
        return answer

    def _compare_clocks(self, ours: float, theirs: float) -> None:
        """Measure how far the clocks differ. theirs: 0 if the coordinator did not say."""
        if not theirs:
            return
        self.clock_ahead_s = ours - theirs
        if abs(self.clock_ahead_s) > WRONG_CLOCK_S:
            self._clocks.failed(
                "this machine's clock is %.0f s %s the coordinator's, by which tickets are judged: set it, as by NTP",
                abs(self.clock_ahead_s),
                "ahead of" if self.clock_ahead_s > 0 else "behind",
            )
        else:
            self._clocks.worked()

    def _now(self) -> float:
        """Return the time by the coordinator's clock."""
        return time.time() - self.clock_ahead_s

    @property
    def _stub(self) -> Any:
        return coordinator_pb2_grpc.RegistryStub(self._channel)  # type: ignore[no-untyped-call]

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        token = join_token(self._config)  # each time, since a coordinator on this machine may start again with another
        return (("authorization", f"Bearer {token}"),) if token else ()

    async def leave(self) -> None:
        """Return the lease, if the coordinator can be reached."""
        request = pb.DeregisterRequest(verifier_id=self._request.verifier_id, instance=self._request.instance)
        try:
            await self._stub.Deregister(request, timeout=1.0, metadata=self._metadata())
        except grpc.aio.AioRpcError as error:
            log.info("not deregistered, the lease will end by itself: %s", error_from_rpc(error))

    async def close(self) -> None:
        await self._channel.close()


def directives_of(answer: pb.ReportResponse) -> Iterator[tuple[str, int, Directive]]:
    """Yield (session id, epoch, directive) of each directive, but for those out of bounds, which are logged."""
    for message in answer.directives:
        try:
            check_directive(message.directive)
            yield message.session_id, message.epoch, message.directive
        except BadRequest as error:
            name = short_id(message.session_id)
            log.warning("the coordinator's directive for session %s is ignored: %s", name, error)
