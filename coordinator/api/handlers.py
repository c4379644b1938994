"""What the coordinator decides. No protobuf, no gRPC, no redis: records in, records out, core errors raised."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from coordinator import placement
from coordinator.api.counters import CoordinatorCounters
from coordinator.api.recording_policy import RecordingPolicy
from coordinator.config import CoordinatorConfig
from coordinator.records import (
    Fleet,
    Grant,
    Membership,
    Opening,
    Placed,
    PlacementRequest,
    Prior,
    Registration,
    ReportReply,
    ResumeOrder,
    Seat,
    VerifierStatus,
    WindowBounds,
    WindowDecision,
    Windows,
    WorkloadKey,
)
from coordinator.store.keyring import Keyring
from coordinator.store.redis_store import Store
from coordinator.window import report_adapter
from coordinator.window.decision_queue import WAIT_S, Deciding
from outrider.core.errors import BadRequest, NotFound, PermissionDenied, Unavailable
from outrider.core.protocol.messages import SessionLimits
from outrider.core.telemetry import SessionTelemetry, VerifierTelemetry
from outrider.telemetry import logs
from outrider.wire import ticket
from outrider.wire.ticket import Claims, Target

log = logging.getLogger(__name__)

STATUS_VERIFIERS = 1_000
"""That one Status answer lists: about 500 bytes each."""


@dataclass(frozen=True)
class _Session:
    """Whose session is being placed, and above which epoch."""

    session_id: str
    tenant: str
    floor: int
    draft: str
    """Release that its device drafted with when it was opened."""
    traffic: str
    keep_s: float
    """That what is produced may be kept; 0: nothing of it may."""
    keep_prompts: bool


class Handlers:
    """One for each process; holds no state that another process would miss."""

    def __init__(
        self,
        store: Store,
        keyring: Keyring,
        config: CoordinatorConfig,
        *,
        now: Callable[[], float] = time.time,
        draw: random.Random | None = None,
    ) -> None:
        self._store = store
        self._keyring = keyring
        self._config = config
        self._now = now
        self._draw = draw or random.Random()
        self._started = time.monotonic()
        self.counters = CoordinatorCounters(store.counters)
        self._deciding = Deciding(min(WAIT_S, config.report_interval_ms / 2e3))

    async def open(self, tenant: str, need: PlacementRequest, recording: RecordingPolicy) -> Opening:
        """Place a new session, and draw once whether it may be recorded.

        Raises NotFound, BadRequest, Overloaded or Unavailable.
        """
        fleet = await self._store.verifiers()
        named = replace(need, target=placement.sole_target(fleet, need.target))
        session_id = secrets.token_hex(16)
        keep_s = recording.keep_s_of(session_id)
        keep_prompts = keep_s > 0 and recording.prompts
        session = _Session(session_id, tenant, 0, need.draft, need.traffic, keep_s, keep_prompts)
        opening = await self._place(session, named, fleet)
        return replace(
            opening, prior=await self._prior(WorkloadKey(tenant, need.draft, need.traffic, opening.target.weights_hash))
        )

    async def resume(self, tenant: str, order: ResumeOrder) -> Opening:
        """Place a session anew, above every epoch that its device, its ticket or the store knows of.

        What its ticket says of drafts and recording goes on. Raises Killed for one that an operator has ended.
        """
        claims = await self._owner(tenant, order.session_id, order.ticket)
        need = PlacementRequest(
            target=claims.target.name,
            rtt_ms=order.rtt_ms,
            weights=claims.target.weights,
            numerics_class=claims.target.numerics_class,
            failed=order.failed,
            draft=claims.draft_release,
            traffic=claims.traffic_class,
        )
        floor = max(order.last_epoch, claims.epoch_last)
        session = _Session(
            claims.session_id,
            claims.tenant,
            floor,
            claims.draft_release,
            claims.traffic_class,
            claims.keep_s,
            claims.keep_prompts,
        )
        return await self._place(session, need, await self._store.verifiers())

    async def close(self, tenant: str, session_id: str, presented: bytes) -> None:
        """Free what the session holds here. The stream itself ends between device and verifier."""
        claims = await self._owner(tenant, session_id, presented)
        await self._store.close_session(claims.session_id, claims.audience, lease_ms=self._config.lease_ms)

    async def targets(self) -> tuple[Target, ...]:
        """What the live verifiers serve, each identity once."""
        found = {v.registration.target for v in await self._store.verifiers()}
        return tuple(sorted(found, key=lambda t: (t.name, t.weights_hash, t.numerics_class)))

    async def register(self, registration: Registration) -> Membership:
        """Take a verifier in; a restarted one replaces its former self."""
        if await self._store.register(registration, self._config.lease_ms):
            log.warning(
                "verifier %s at %s replaces a live instance of its id; if this repeats, two verifiers share the id",
                registration.verifier_id,
                registration.address,
            )
        log.info("verifier %s registered at %s", registration.verifier_id, registration.address)
        return self.membership

    async def report(
        self, verifier_id: str, instance: int, verifier: VerifierTelemetry, sessions: Sequence[SessionTelemetry]
    ) -> ReportReply | None:
        """Renew a verifier's lease and its sessions' seats; what it is told. None: it has to register again."""
        heard = await self._store.report(verifier_id, instance, verifier, sessions, lease_ms=self._config.lease_ms)
        if heard is None:
            return None
        windows: tuple[WindowDecision, ...] = ()
        if self._config.window_control:
            windows = await self._deciding.about(
                verifier_id, lambda: self._decide(verifier_id, verifier, sessions, heard.kinds)
            )
        return ReportReply(windows, heard.killed, heard.drain)

    async def _decide(
        self,
        verifier_id: str,
        verifier: VerifierTelemetry,
        sessions: Sequence[SessionTelemetry],
        kinds: Mapping[str, WorkloadKey],
    ) -> tuple[WindowDecision, ...]:
        before = await self._store.windows([verifier_id])
        bounds = await self._store.bounds(["", *(session.session_id for session in sessions)])
        new = {
            s.session_id: kinds[s.session_id]
            for s in sessions
            if report_adapter.wants_prior(s) and s.session_id in kinds
        }
        seen = await self._store.priors(new.values())
        priors = {session_id: seen[kind] for session_id, kind in new.items() if kind in seen}
        begun = time.perf_counter()
        windows = await asyncio.to_thread(
            report_adapter.decide, verifier, sessions, before, bounds, self.limits, priors
        )
        self.counters.decide(windows.values(), time.perf_counter() - begun)
        await self._store.decide(verifier_id, windows.values(), keep_ms=2 * self._config.lease_ms)
        return tuple(windows.values())

    async def deregister(self, verifier_id: str, instance: int) -> None:
        """Let a verifier go; nothing happens if it had gone already."""
        if await self._store.deregister(verifier_id, instance):
            log.info("verifier %s left", verifier_id)

    async def status(self) -> Fleet:
        """Everything at a glance."""
        ids = await self._store.fleet()
        verifiers = await self._store.verifiers(ids[:STATUS_VERIFIERS])
        held, total = await self._store.seated(ids, self._config.status_sessions)
        sessions = await self._store.sessions(held)
        up_s = time.monotonic() - self._started
        return Fleet(tuple(verifiers), tuple(sessions), self._store.name, up_s, len(ids), total)

    async def windows(self, session_id: str) -> Windows:
        """What was decided of one session's window, or of all ("") there are."""
        everything = (await self._store.windows(await self._store.fleet())).values()
        found = [window for window in everything if session_id in ("", window.session_id)]
        decided = found[: self._config.status_sessions]
        asked = ["", session_id, *(window.session_id for window in decided)]
        return Windows(tuple(decided), await self._store.bounds(asked), len(found))

    async def bound(self, session_id: str, bounds: WindowBounds | None) -> None:
        """Allow a session's window so much, or every other's (""). Raises NotFound, or BadRequest."""
        if not self._config.window_control:
            raise BadRequest("this coordinator leaves windows to its verifiers (window_control is off)")
        if session_id and not await self._store.knows(session_id):
            raise NotFound(f"no session {session_id}; `outrider sessions list` shows them")
        await self._store.bound(session_id, bounds, keep_ms=self._config.session_ms if session_id else None)

    @property
    def limits(self) -> SessionLimits:
        """Of every session, by its ticket."""
        return self._config.limits

    @property
    def membership(self) -> Membership:
        """What a registered verifier is told."""
        return Membership(self._config.lease_ms, self._config.report_interval_ms, self._keyring.public_keys)

    async def exchange_keys(self) -> None:
        """Publish our public key and learn those of the other coordinators. Raises Unavailable."""
        ours = self._keyring.signer
        keys = await self._store.share_key(ours.key_id, ours.public_key, self._config.session_ms)
        self._keyring.learn(keys)

    async def _place(self, session: _Session, need: PlacementRequest, fleet: Sequence[VerifierStatus]) -> Opening:
        alive = 0
        ranked = placement.candidates(fleet, need, self._draw, self._config.unknown_rtt_ms)
        for among in placement.batches(ranked):
            placed = await self._store.place(
                session.session_id,
                session.tenant,
                need,
                among,
                floor=session.floor,
                span=self._config.epoch_span,
                seat_ms=self._config.seat_grace_ms,
                session_ms=self._config.session_ms,
                load_weight_ms=self._config.load_weight_ms,
            )
            if isinstance(placed, Placed):
                logs.note(session=session.session_id)
                log.info("placed on %s with epochs from %d", placed.primary.verifier_id, placed.epoch)
                self.counters.place(resumed=session.floor > 0, standby=placed.standby is not None)
                return self._opening(session, placed)
            alive += placed
        raise placement.refusal(fleet, need, alive)

    async def _prior(self, kind: WorkloadKey) -> Prior:
        """What is known of such sessions; nothing where the store has just gone: the session is placed all the same."""
        if not kind.draft:
            return Prior()
        try:
            return (await self._store.priors([kind])).get(kind, Prior())
        except Unavailable:
            return Prior()

    def _opening(self, session: _Session, placed: Placed) -> Opening:
        expires = self._now() + self._config.ticket_ttl_s
        second = placed.epoch + self._config.epoch_span
        return Opening(
            session_id=session.session_id,
            target=placed.primary.target,
            primary=self._grant(session, placed.primary, placed.epoch, expires),
            standby=self._grant(session, placed.standby, second, expires) if placed.standby else None,
            expires_unix=expires,
        )

    def _grant(self, session: _Session, seat: Seat, first: int, expires: float) -> Grant:
        last = first + self._config.epoch_span - 1
        claims = Claims(
            session_id=session.session_id,
            tenant=session.tenant,
            audience=seat.verifier_id,
            epoch_first=first,
            epoch_last=last,
            expires_unix=expires,
            limits=self._config.limits,
            target=seat.target,
            draft_release=session.draft,
            traffic_class=session.traffic,
            keep_s=session.keep_s,
            keep_prompts=session.keep_prompts,
        )
        return Grant(seat, self._keyring.signer.sign(claims), first, last)

    async def _owner(self, tenant: str, session_id: str, presented: bytes) -> Claims:
        """The claims of a ticket that proves that `tenant` owns the session."""
        await self._know_key(ticket.ticket_key_id(presented))
        claims = ticket.verify(
            presented,
            self._keyring.public_keys,
            audience=None,
            now=self._now(),
            grace_s=self._config.resume_grace_s,
        )
        if claims.session_id != session_id:
            raise PermissionDenied(f"the ticket is for session {claims.session_id!r}, not for {session_id!r}")
        if claims.tenant != tenant:
            raise PermissionDenied("the session belongs to another tenant; use the API key that opened it")
        return claims

    async def _know_key(self, key_id: str) -> None:
        """Another coordinator may have signed with a key that it published a moment ago."""
        if key_id in self._keyring.public_keys:
            return
        try:
            await self.exchange_keys()
        except Unavailable:
            log.warning("a ticket names key %s, and the store that might know it cannot be reached", key_id)
