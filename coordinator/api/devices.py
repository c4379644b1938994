"""Answer devices: open, resume and close sessions, and offer releases. Everything inbound is held against a bound."""

from __future__ import annotations

import asyncio
import logging
import random
import secrets
import time
from dataclasses import replace

from coordinator import placement
from coordinator.api.services import CALLER, Servicer, rpc, session_id, verifier_id
from coordinator.config import LIMITS, RESUME_GRACE_S, TICKET_MS, TICKET_TTL_S
from coordinator.store import keys
from coordinator.store.sessions import EPOCH_SPAN, Placement
from outrider.core.acceptance.history import HIT, SIBLING
from outrider.core.errors import BadRequest, OutriderError, Overloaded, PermissionDenied, Unavailable
from outrider.core.protocol.messages import MAX_PROMPT_TOKENS
from outrider.core.text import short_id
from outrider.telemetry import logs
from outrider.wire import ticket
from outrider.wire.bounds import at_most, label, text
from outrider.wire.checks import MAX_TICKET_BYTES
from outrider.wire.ticket import MAX_TARGET_TEXT, Claims, Target, target_from_proto
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc as stubs

log = logging.getLogger(__name__)

MAX_FAILED = 64
MAX_EPOCH = 2**52
"""Epochs start as microseconds since 1970 and must stay exact in a double (Lua); this leaves until the year 2112."""
FLEET_S = 0.5
"""Seconds for which the fleet that was read serves to place sessions: reading it costs more than placing one. Whether a
verifier has room is read with each placement."""
AGAIN_S = 0.05
"""The same before a session is refused."""
PLACED_AT_ONCE = 32
"""Sessions that are opened at once, and resumed at once, so that reports, of which none waits, keep their share of a
busy process."""
BUSY_S = 1.0
"""Seconds that they may wait, since devices give up an answer after five; and after which they may ask again."""


class CoordinatorServicer(Servicer, stubs.CoordinatorServicer):
    """The calls of devices; the caller is a tenant."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._draw = random.Random()
        self._turns = {kind: asyncio.Semaphore(PLACED_AT_ONCE) for kind in ("open", "resume")}

    @rpc
    async def OpenSession(self, request: pb.OpenSessionRequest) -> pb.OpenSessionResponse:
        """Place a new session, drawn once for recording. Raises NotFound, BadRequest, Overloaded or Unavailable."""
        at_most("length of target", len(request.target), MAX_TARGET_TEXT)
        at_most("prompt_tokens", request.prompt_tokens, MAX_PROMPT_TOKENS)
        caller, name = CALLER.get(), secrets.token_hex(16)
        recording = self.authenticator.recording(caller.name)
        keep_s = recording.keep_s_of(name)
        claims = Claims(
            session_id=name,
            tenant=caller.name,
            audience="",
            epoch_first=0,
            epoch_last=0,
            expires_unix=0.0,
            limits=LIMITS,
            target=Target(request.target, "", ""),
            draft_release=label("draft_release", request.draft_release),
            traffic_class=label("traffic_class", request.traffic_class),
            keep_s=keep_s,
            keep_prompts=keep_s > 0 and recording.prompts,
            api_key_id=caller.api_key_id,
        )
        device_id = label("device_id", request.device_id)
        opened = await self._place(claims, device_id=device_id, probes=not request.prompt_tokens)
        if claims.draft_release:
            weights = opened.target.weights_hash
            prior = keys.prior(weights, caller.name, claims.draft_release, claims.traffic_class)
            opened.MergeFrom(pb.OpenSessionResponse(prior=await self._prior(prior)))
        return opened

    @rpc
    async def ResumeSession(self, request: pb.ResumeSessionRequest) -> pb.OpenSessionResponse:
        """Place a session anew, above every epoch that its device, its ticket or the store knows of.

        Any ticket of the session will do. Its target, draft, traffic class and recording go on. Raises Killed if an
        operator has ended the session, PermissionDenied if its device has closed it, and what open and close raise.
        """
        at_most("entries in failed_verifiers", len(request.failed_verifiers), MAX_FAILED)
        at_most("last_epoch", request.last_epoch, MAX_EPOCH)
        failed = frozenset(verifier_id(name, "failed_verifiers") for name in request.failed_verifiers)
        claims = self._owner(request)
        floor = max(request.last_epoch, claims.epoch_last)
        return await self._place(replace(claims, epoch_last=floor, api_key_id=CALLER.get().api_key_id), failed=failed)

    @rpc
    async def CloseSession(self, request: pb.CloseSessionRequest) -> pb.CloseSessionResponse:
        """Free what a session holds here. The stream itself ends between device and verifier.

        Raises Unauthenticated or PermissionDenied for a ticket that does not prove ownership.
        """
        await self.sessions.close(self._owner(request), keep_ms=TICKET_MS)
        return pb.CloseSessionResponse()

    @rpc
    async def OfferRelease(self, request: pb.OfferReleaseRequest) -> pb.OfferReleaseResponse:
        label("in_use", request.in_use)
        target = text("target", request.target, 1, MAX_TARGET_TEXT)
        serial, release = await self.releases.offer(target, label("device_id", request.device_id))
        if release is None:
            return pb.OfferReleaseResponse(serial=serial)
        canary, base_url = release.state == pb.RELEASE_STATE_CANARY, self.releases.base_url
        return pb.OfferReleaseResponse(serial=serial, manifest=release.manifest, canary=canary, base_url=base_url)

    async def _place(
        self, claims: Claims, *, failed: frozenset[str] = frozenset(), device_id: str = "", probes: bool = False
    ) -> pb.OpenSessionResponse:
        """Place the session of these claims; their epoch_last is the greatest epoch used so far, 0 in a new session.

        failed: verifiers to avoid while any other has room. device_id: by which the device is drawn for trials of
        drafts. probes: whether it has no prompt; a device may make such a session every few seconds, or fetch files.
        """
        kind = "resume" if claims.epoch_last else "open"
        turns = self._turns[kind]
        try:
            async with asyncio.timeout(BUSY_S):
                await turns.acquire()
        except TimeoutError:
            raise Overloaded(
                f"more sessions wait to be placed than this coordinator places in {BUSY_S:g} s; ask again then, or"
                " another",
                retry_after_s=BUSY_S,
            ) from None
        try:
            placed = await self._placed(claims, failed, device_id)
        finally:
            turns.release()
        self.counters.placed[kind, "yes" if placed.standby else "no"] += 1
        logs.note(session=claims.session_id)
        log.log(
            logging.DEBUG if probes else logging.INFO,
            "placed on %s with epochs from %d",
            placed.primary.verifier_id,
            placed.epoch,
        )
        return await self._opened(claims, placed)

    async def _placed(self, claims: Claims, failed: frozenset[str], device_id: str) -> Placement:
        """Place the session by the fleet as it was read a little before, or refuse it by what was read a moment ago."""
        fleet: placement.Fleet = {}
        refused: OutriderError | None = None
        for age_s in (FLEET_S, AGAIN_S):
            before, fleet = fleet, await self.verifiers.fleet_within(age_s)
            if refused is not None and fleet is before:
                break
            try:
                wanted = replace(claims.target, name=placement.sole_target(fleet, claims.target.name))
            except BadRequest as error:
                refused = error
                continue
            ranked = placement.candidates(fleet, wanted, failed, self._draw)
            placed, alive = await self.sessions.place(replace(claims, target=wanted), ranked, failed, device_id)
            if placed is not None:
                return placed
            refused = placement.refusal(fleet, wanted, alive)
        raise refused or Unavailable("no verifier is registered")

    async def _opened(self, claims: Claims, placed: Placement) -> pb.OpenSessionResponse:
        """Return the answer to a device, with a ticket for each verifier."""
        expires_unix = time.time() + TICKET_TTL_S
        claims = replace(claims, max_streams=placed.max_streams, expires_unix=expires_unix, limits=LIMITS)
        kept = replace(claims, place_until_unix=placed.until_unix)
        waiting = replace(claims, place_until_unix=0.0)
        return pb.OpenSessionResponse(
            session_id=claims.session_id,
            target=placed.primary.target,
            primary=self._grant(kept, placed.primary, placed.epoch),
            standby=self._grant(waiting, placed.standby, placed.epoch + EPOCH_SPAN) if placed.standby else None,
            expires_unix=expires_unix,
            release_serial=await self.releases.serial(),
        )

    def _grant(self, claims: Claims, verifier: pb.RegisterRequest, first: int) -> pb.Grant:
        """Return the grant of a verifier with a ticket for these epochs."""
        last, target = first + EPOCH_SPAN - 1, target_from_proto(verifier.target)
        claims = replace(claims, audience=verifier.verifier_id, epoch_first=first, epoch_last=last, target=target)
        return pb.Grant(
            verifier_id=verifier.verifier_id,
            address=verifier.address,
            tls=verifier.tls,
            ticket=self.keys.signer.sign(claims),
            epoch_first=first,
            epoch_last=last,
            limits=LIMITS.message,
        )

    async def _prior(self, key: str) -> pb.Prior | None:
        """Return what a prior tells a device; nothing if the store has just gone, since the session is placed."""
        try:
            known = (await self.sessions.priors([key])).get(key)
        except Unavailable:
            return None
        if known is None or not (history := known.acceptance_history):
            return None
        first, sibling = history.count(HIT), history.count(SIBLING)
        return pb.Prior(
            first_acceptance=first / len(history),
            sibling_acceptance=sibling / max(1, len(history) - first),
            observations=len(history),
        )

    def _owner(self, request: pb.ResumeSessionRequest | pb.CloseSessionRequest) -> Claims:
        """Return the claims of a ticket that proves that the caller owns the session."""
        named = session_id(request.session_id)
        at_most("bytes of ticket", len(request.ticket), MAX_TICKET_BYTES)
        known, grace_s = self.keys.public_keys, RESUME_GRACE_S
        claims = ticket.verify(request.ticket, known, audience=None, now=time.time(), grace_s=grace_s)
        if claims.session_id != named:
            raise PermissionDenied(
                f"the ticket is for session {short_id(claims.session_id)!r}, not for {short_id(named)!r}"
            )
        if claims.tenant != CALLER.get().name:
            raise PermissionDenied("the session belongs to another tenant; use the API key that opened it")
        return claims
