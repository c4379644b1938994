"""Answer what devices and verifiers ask: records in, records out, core errors raised; no protobuf, no gRPC."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from coordinator import placement
from coordinator.api.authentication import Caller, RecordingPolicy
from coordinator.api.counters import CoordinatorCounters
from coordinator.api.ticket_key import TicketKeys
from coordinator.config import LIMITS, RESUME_GRACE_S, TICKET_MS, TICKET_TTL_S, CoordinatorConfig
from coordinator.records import (
    Grant,
    OpenedSession,
    PlacementRequest,
    Prior,
    ReportReply,
    VerifierRegistration,
    WindowDecision,
    WorkloadKey,
)
from coordinator.store.redis_store import RedisStore
from coordinator.store.sessions import EPOCH_SPAN, Placement, SessionStore, WindowStore
from coordinator.store.verifiers import VerifierStore
from coordinator.window import report_adapter
from outrider.core.errors import BadRequest, OutriderError, Overloaded, PermissionDenied, Unavailable
from outrider.core.telemetry import SessionTelemetry, VerifierTelemetry
from outrider.core.text import short_id
from outrider.telemetry import logs
from outrider.wire import ticket
from outrider.wire.ticket import Claims, Target

log = logging.getLogger(__name__)

FLEET_S = 0.5
"""Seconds for which the fleet that was read serves to place sessions: reading it costs more than placing one. Whether a
verifier has room is read with each placement."""
AGAIN_S = 0.05
"""The same before a session is refused."""
PLACED_AT_ONCE, MOST_WAITING = 32, 512
"""Sessions that are opened at once, and resumed at once, so that reports, of which none waits, keep their share of a
busy process; and how many more may wait for that."""
BUSY_S = 1.0
"""Seconds that they may wait, since devices give up an answer after five; and after which they may ask again."""
DECIDING_S = 1.0
"""Seconds that a report waits for its turn to have windows decided. After that it is answered without decisions: its
verifier waits for three seconds in all, and keeps its sessions' windows for longer."""
_NO_TARGET = Target("", "", "")


class Handlers:
    """The calls of devices and verifiers. It holds no state that another coordinator process would miss."""

    def __init__(self, store: RedisStore, keys: TicketKeys, config: CoordinatorConfig) -> None:
        self.config = config
        self.keys = keys
        self.counters = CoordinatorCounters(store.counters)
        self._verifiers, self._sessions, self._windows = VerifierStore(store), SessionStore(store), WindowStore(store)
        self._draw = random.Random()
        self._deciding = asyncio.Lock()
        """Held by the report that is decided on: threads share one processor, so all at once would all be late."""
        self._fleet_read: placement.Fleet = {}
        self._fleet_read_at = -math.inf
        """When it was, by the monotonic clock."""
        self._fleet_reading = asyncio.Lock()
        self._turns = {kind: asyncio.Semaphore(PLACED_AT_ONCE) for kind in ("open", "resume")}
        self._waiting = dict.fromkeys(self._turns, 0)
        """Numbers of calls that wait for them."""

    async def open(self, caller: Caller, request: PlacementRequest, recording: RecordingPolicy) -> OpenedSession:
        """Place a new session, drawn once for recording. Raises NotFound, BadRequest, Overloaded or Unavailable."""
        session_id = secrets.token_hex(16)
        keep_s = recording.keep_s_of(session_id)
        given = (request.draft, request.traffic, keep_s, keep_s > 0 and recording.prompts)
        claims = Claims(session_id, caller.name, "", 0, 0, 0.0, LIMITS, _NO_TARGET, *given, caller.api_key_id)
        opened = await self._place(claims, request)
        weights = opened.primary.verifier.target.weights_hash
        prior = await self._prior(WorkloadKey(caller.name, request.draft, request.traffic, weights))
        return replace(opened, prior=prior)

    async def resume(
        self, caller: Caller, session_id: str, presented: bytes, last_epoch: int, request: PlacementRequest
    ) -> OpenedSession:
        """Place a session anew, above every epoch that its device, its ticket or the store knows of.

        presented: any ticket of the session. Its target, draft, traffic class and recording go on; of the request, only
        failed verifiers count. Raises Killed if an operator has ended the session, PermissionDenied if
        its device has closed it, and what `open` and `close` raise.
        """
        claims = self._owner(caller.name, session_id, presented)
        bound = replace(
            request,
            target=claims.target.name,
            weights=claims.target.weights,
            draft=claims.draft_release,
            traffic=claims.traffic_class,
        )
        floor = max(last_epoch, claims.epoch_last)
        claims = replace(claims, epoch_last=floor, api_key_id=caller.api_key_id)
        return await self._place(claims, bound)

    async def close(self, tenant: str, session_id: str, presented: bytes) -> None:
        """Free what a session holds here. The stream itself ends between device and verifier.

        Raises Unauthenticated or PermissionDenied for a ticket that does not prove ownership.
        """
        claims = self._owner(tenant, session_id, presented)
        await self._sessions.close(claims, keep_ms=TICKET_MS)

    async def targets(self) -> tuple[Target, ...]:
        """Return what the live verifiers serve, each target identity once."""
        found = set((await self._fleet(AGAIN_S)).values())
        return tuple(sorted(found, key=lambda target: (target.name, target.weights_hash)))

    async def register(self, registration: VerifierRegistration) -> None:
        """Register a verifier; a restarted one replaces its former instance."""
        replaced = await self._verifiers.register(registration, self.config.lease_ms)
        self._fleet_read_at = -math.inf
        if replaced:
            log.warning(
                "verifier %s at %s replaces a live instance of its id; if this repeats, two verifiers share the id",
                registration.verifier_id,
                registration.address,
            )
        log.info("verifier %s registered at %s", registration.verifier_id, registration.address)

    async def report(
        self,
        verifier_id: str,
        instance: int,
        verifier: VerifierTelemetry,
        sessions: Sequence[SessionTelemetry],
        tokens: Mapping[str, int],
        seen: int,
        *,
        sequence: int = 0,
    ) -> tuple[ReportReply, Sequence[WindowDecision]] | None:
        """Renew a verifier's lease and placements, and decide on its sessions' windows. Return None if it has to
        register again.

        tokens: a batch of those generated, by tenant. sequence: its number, by which it counts once. seen: the
        revocations that the verifier knows, as the last reply named them.
        """
        reply = await self._verifiers.report(
            verifier_id, instance, verifier, sessions, tokens, seen, self.config, sequence=sequence
        )
        if reply is None:
            return None
        if not self.config.window_control:
            return reply, ()
        try:
            async with asyncio.timeout(DECIDING_S):
                await self._deciding.acquire()
        except TimeoutError:
            log.warning("windows of verifier %s are not decided: this coordinator is busy", verifier_id)
            return reply, ()
        try:
            return reply, await self._decide(verifier_id, verifier, sessions, reply)
        except Exception as error:  # the lease is renewed, which matters more than windows
            defect = not isinstance(error, OutriderError)
            log.warning("windows of verifier %s are not decided: %s", verifier_id, error, exc_info=defect)
            return reply, ()
        finally:
            self._deciding.release()

    async def _decide(
        self, verifier_id: str, verifier: VerifierTelemetry, sessions: Sequence[SessionTelemetry], reply: ReportReply
    ) -> Sequence[WindowDecision]:
        """Decide on the windows of a verifier's sessions, and keep what was decided. Raises Unavailable."""
        before = await self._windows.decisions([verifier_id])
        new = {
            session.session_id: reply.workloads[session.session_id]
            for session in sessions
            if session.session_id in reply.workloads and report_adapter.wants_prior(session)
        }
        known = await self._windows.priors(new.values())
        priors = {session_id: known[workload] for session_id, workload in new.items() if workload in known}

        def decide() -> tuple[Sequence[WindowDecision], float]:
            begun = time.thread_time()
            made = report_adapter.decide(verifier, sessions, before, reply.bounds, LIMITS, priors)
            return tuple(made.values()), time.thread_time() - begun

        decisions, seconds = await asyncio.to_thread(decide)
        self.counters.decide(decisions, seconds)
        await self._windows.set_decisions(verifier_id, decisions, keep_ms=2 * self.config.lease_ms)
        return decisions

    async def deregister(self, verifier_id: str, instance: int) -> None:
        """End a verifier's lease; nothing happens if it has ended already."""
        left = await self._verifiers.deregister(verifier_id, instance)
        self._fleet_read_at = -math.inf
        if left:
            log.info("verifier %s left", verifier_id)

    async def _place(self, claims: Claims, request: PlacementRequest) -> OpenedSession:
        """Place the session of these claims; their epoch_last is the greatest epoch used so far, 0 in a new session.

        A session is refused by what was read of the fleet a moment ago, and placed by what was read a little before.
        """
        kind = "resume" if claims.epoch_last else "open"
        turns = self._turns[kind]
        busy = Overloaded(
            f"more sessions wait to be placed than this coordinator places in {BUSY_S:g} s; ask again then, or another",
            retry_after_s=BUSY_S,
        )
        if self._waiting[kind] >= MOST_WAITING:
            raise busy
        self._waiting[kind] += 1
        try:
            async with asyncio.timeout(BUSY_S):
                await turns.acquire()
        except TimeoutError:
            raise busy from None
        finally:
            self._waiting[kind] -= 1
        try:
            return await self._placed(claims, request)
        finally:
            turns.release()

    async def _placed(self, claims: Claims, request: PlacementRequest) -> OpenedSession:
        fleet: placement.Fleet = {}
        refused: OutriderError | None = None
        for age_s in (FLEET_S, AGAIN_S):
            before, fleet = fleet, await self._fleet(age_s)
            if refused is not None and fleet is before:
                break
            try:
                named = replace(request, target=placement.sole_target(fleet, request.target))
            except BadRequest as error:
                refused = error
                continue
            ranked = placement.candidates(fleet, named, self._draw)
            placed = await self._sessions.place(claims, named, placement.batches(ranked), self.config)
            if not isinstance(placed, int):
                return self._opened(claims, placed, quiet=not claims.epoch_last and not request.prompt_tokens)
            refused = placement.refusal(fleet, named, placed)
        raise refused or Unavailable("no verifier is registered")

    async def _fleet(self, age_s: float) -> placement.Fleet:
        """Return the verifiers with a lease, as they were at most so many seconds ago, the same value until then."""
        async with self._fleet_reading:
            if time.monotonic() - self._fleet_read_at > age_s:
                begun = time.monotonic()
                self._fleet_read = await self._verifiers.fleet()
                self._fleet_read_at = begun
            return self._fleet_read

    def _opened(self, claims: Claims, placed: Placement, *, quiet: bool) -> OpenedSession:
        epoch, primary, standby = placed.epoch, placed.primary, placed.standby
        logs.note(session=claims.session_id)
        # A session without a prompt is a probe, of which a device may make one every few seconds, or fetches files.
        level = logging.DEBUG if quiet else logging.INFO
        log.log(level, "placed on %s with epochs from %d", primary.verifier_id, epoch)
        claims = replace(claims, max_streams=placed.max_streams, place_until_unix=0.0)
        kept = replace(claims, place_until_unix=placed.until_unix)
        self.counters.placed["resume" if claims.epoch_last else "open", "yes" if standby else "no"] += 1
        expires_unix = time.time() + TICKET_TTL_S
        return OpenedSession(
            session_id=claims.session_id,
            primary=self._grant(kept, primary, epoch, expires_unix),
            standby=self._grant(claims, standby, epoch + EPOCH_SPAN, expires_unix) if standby else None,
            expires_unix=expires_unix,
        )

    def _grant(self, claims: Claims, verifier: VerifierRegistration, first: int, expires_unix: float) -> Grant:
        last = first + EPOCH_SPAN - 1
        signed = self.keys.signer.sign(
            replace(
                claims,
                audience=verifier.verifier_id,
                epoch_first=first,
                epoch_last=last,
                expires_unix=expires_unix,
                limits=LIMITS,
                target=verifier.target,
            )
        )
        return Grant(verifier, signed, first, last)

    async def _prior(self, workload: WorkloadKey) -> Prior:
        """Return what is known of the workload; nothing if the store has just gone, since the session is placed."""
        if not workload.draft:
            return Prior()
        try:
            return (await self._windows.priors([workload])).get(workload, Prior())
        except Unavailable:
            return Prior()

    def _owner(self, tenant: str, session_id: str, presented: bytes) -> Claims:
        """Return the claims of a ticket that proves that `tenant` owns the session."""
        known, grace_s = self.keys.public_keys, RESUME_GRACE_S
        claims = ticket.verify(presented, known, audience=None, now=time.time(), grace_s=grace_s)
        if claims.session_id != session_id:
            named = short_id(claims.session_id)
            raise PermissionDenied(f"the ticket is for session {named!r}, not for {short_id(session_id)!r}")
        if claims.tenant != tenant:
            raise PermissionDenied("the session belongs to another tenant; use the API key that opened it")
        return claims
