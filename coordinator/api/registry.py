"""Answer verifiers: register them, and answer their reports with what to do. Everything inbound is held against a
bound."""

from __future__ import annotations

import asyncio
import logging
import math
import statistics
import time
from collections.abc import Sequence

from coordinator import window
from coordinator.api.authentication import tenant_name
from coordinator.api.services import Servicer, rpc, verifier_id
from coordinator.config import LIMITS
from coordinator.store.verifiers import Reported
from outrider.core.addresses import split_address
from outrider.core.errors import BadRequest, OutriderError, between
from outrider.wire.bounds import at_most
from outrider.wire.telemetry import MAX_LIVE_SESSIONS, check_session, check_verifier
from outrider.wire.ticket import target_from_proto
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc as stubs

log = logging.getLogger(__name__)

MAX_ADDRESS = 255
MAX_CAPACITY = 4_096
MAX_REPORTED_TOKENS = 2**40
PATIENCE_S = 0.25, 1.0
"""The least and the most seconds that a report waits for its turn to have windows decided. After that it is answered
without decisions: its verifier waits for three seconds in all, and keeps its sessions' windows for longer."""


class RegistryServicer(Servicer, stubs.RegistryServicer):
    """The calls of verifiers, which have the join token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._deciding = asyncio.Lock()
        """Held by the report that is decided on: threads share one processor, so all at once would all be late."""
        self._decided_s: dict[str, float] = {}
        """When verifiers were decided about, of those whose next report may have to wait less for it."""
        self._rest_s = 0.0
        """Seconds after the last decisions in which no others are made."""

    @rpc
    async def Register(self, request: pb.RegisterRequest) -> pb.RegisterResponse:
        """Register a verifier; a restarted one replaces its former instance."""
        at_most("length of address", len(request.address), MAX_ADDRESS)
        _, port = split_address(request.address)
        between("port of address", port, 1, 65_535)
        between("capacity_sessions", request.capacity_sessions, 1, MAX_CAPACITY)
        name = _identified(request)
        target_from_proto(request.target)  # raises BadRequest
        if await self.verifiers.register(request, self.config.lease_ms):
            log.warning(
                "verifier %s at %s replaces a live instance of its id; if this repeats, two verifiers share the id",
                name,
                request.address,
            )
        log.info("verifier %s registered at %s", name, request.address)
        return pb.RegisterResponse(
            lease_ms=self.config.lease_ms,
            report_interval_ms=self.config.report_interval_ms,
            public_keys=self.keys.public_keys,
            unix=time.time(),
        )

    @rpc
    async def Report(self, request: pb.ReportRequest) -> pb.ReportResponse:
        """Renew a verifier's lease and placements, and decide on its sessions' windows."""
        _identified(request)
        at_most("entries in sessions", len(request.sessions), MAX_LIVE_SESSIONS)
        check_verifier(request.verifier)
        for session in request.sessions:
            check_session(session)
        _add_totals(request)
        at_most("entries in tenant_tokens", len(request.tenant_tokens), MAX_LIVE_SESSIONS)
        for name, tokens in request.tenant_tokens.items():
            tenant_name(name)
            at_most("tenant_tokens", tokens, MAX_REPORTED_TOKENS)
        found = await self.verifiers.report(request, self.config)
        if found is None:
            return pb.ReportResponse(public_keys=self.keys.public_keys, release_serial=await self.releases.serial())
        answer = found.answer
        for decision in await self._decisions(request, found):
            told = window.directive(decision, LIMITS)
            answer.directives.add(session_id=decision.session_id, epoch=decision.epoch, directive=told)
        answer.public_keys.update(self.keys.public_keys)
        answer.unix = time.time()
        answer.release_serial = await self.releases.sample(found.weights, request.sessions, found.devices)
        return answer

    @rpc
    async def Deregister(self, request: pb.DeregisterRequest) -> pb.DeregisterResponse:
        """End a verifier's lease; nothing happens if it has ended already."""
        if await self.verifiers.deregister(_identified(request), request.instance):
            log.info("verifier %s left", request.verifier_id)
        return pb.DeregisterResponse()

    async def _decisions(self, request: pb.ReportRequest, found: Reported) -> Sequence[pb.WindowDecision]:
        """Return the decisions on the sessions' windows; none if that fails, since the lease matters more."""
        name = request.verifier_id
        if not self.config.window_control:
            return ()
        # Where there is not time for all, each waits for as long as its decisions are late: so those about which others
        # were decided since go first, and all are decided about equally often.
        interval_s = self.config.report_interval_ms / 1e3
        late_s = time.monotonic() - self._decided_s.get(name, -math.inf) - interval_s
        try:
            async with asyncio.timeout(min(max(PATIENCE_S[0], late_s), PATIENCE_S[1])):
                await self._deciding.acquire()
        except TimeoutError:
            log.warning("windows of verifier %s are not decided: this coordinator is busy", name)
            return ()
        now = time.monotonic()
        since = now - interval_s - PATIENCE_S[1]
        self._decided_s = {one: at for one, at in self._decided_s.items() if at > since} | {name: now}
        try:
            return await self._decide(request, found)
        except Exception as error:
            defect = not isinstance(error, OutriderError)
            log.warning("windows of verifier %s are not decided: %s", name, error, exc_info=defect)
            return ()
        finally:
            asyncio.get_running_loop().call_later(self._rest_s, self._deciding.release)

    async def _decide(self, request: pb.ReportRequest, found: Reported) -> Sequence[pb.WindowDecision]:
        """Decide on the windows of a verifier's sessions, and keep what was decided. Raises Unavailable."""
        name, sessions = request.verifier_id, request.sessions
        new = {one.session_id for one in sessions if window.wants_prior(one)} & found.priors.keys()
        known = await self.sessions.priors(found.priors[name] for name in new)
        priors = {name: known[found.priors[name]] for name in new if found.priors[name] in known}

        def decide() -> tuple[Sequence[pb.WindowDecision], float]:
            begun = time.thread_time()
            made = window.decide(request.verifier, sessions, found.decisions, found.bounds, LIMITS, priors)
            return tuple(made.values()), time.thread_time() - begun

        begun = time.monotonic()
        decisions, seconds = await asyncio.to_thread(decide)
        # A thread that had to wait for the interpreter made callers wait, too. They come next: a late opening costs its
        # user a first token, a late decision some speed.
        self._rest_s = min(max(0.0, time.monotonic() - begun - seconds), PATIENCE_S[0])
        self.counters.count_decisions(decisions, seconds)
        await self.sessions.set_decisions(name, decisions, keep_ms=2 * self.config.lease_ms)
        return decisions


def _add_totals(request: pb.ReportRequest) -> None:
    """Fill in what of a verifier's telemetry is summed up over its sessions."""
    verifier, sessions = request.verifier, request.sessions
    verifier.evaluated = sum(session.evaluated for session in sessions)
    verifier.accepted = sum(session.accepted for session in sessions)
    measured_ms = [session.rtt_ms for session in sessions if session.rtt_ms]
    verifier.rtt_ms = statistics.median(measured_ms) if measured_ms else 0.0


def _identified(request: pb.RegisterRequest | pb.ReportRequest | pb.DeregisterRequest) -> str:
    """Return the verifier's id. Raises BadRequest for a senseless id or instance."""
    if request.instance == 0:
        raise BadRequest.bound("instance", 0, "a random number other than 0, new at each start")
    return verifier_id(request.verifier_id)
