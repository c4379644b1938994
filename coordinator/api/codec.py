"""Convert the calls of devices and verifiers to records and back.

Everything inbound is held against a bound here; a refusal names field and value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coordinator.api.authentication import tenant_name
from coordinator.config import LIMITS
from coordinator.records import (
    Grant,
    OpenedSession,
    PlacementRequest,
    ReportReply,
    Revocation,
    VerifierRegistration,
    WindowDecision,
)
from coordinator.releases.records import LifecycleState, Release
from coordinator.window import report_adapter
from outrider.core.acceptance.history import HIT, SIBLING
from outrider.core.addresses import split_address
from outrider.core.errors import BadRequest, between
from outrider.core.protocol.messages import MAX_PROMPT_TOKENS, MAX_SESSION_ID, MAX_VERIFIER_ID
from outrider.core.telemetry import SessionTelemetry, VerifierTelemetry
from outrider.wire.bounds import at_most, identifier, label, text
from outrider.wire.codecs import MAX_TICKET_BYTES, directive_to_proto, limits_to_proto
from outrider.wire.telemetry import MAX_LIVE_SESSIONS, session_telemetry_from_proto, verifier_telemetry_from_proto
from outrider.wire.ticket import MAX_TARGET_TEXT, target_from_proto, target_to_proto
from outrider.wire.v1 import coordinator_pb2 as pb

MAX_ADDRESS = 255
MAX_FAILED = 64
MAX_CAPACITY = 4_096
MAX_REPORTED_TOKENS = 2**40
MAX_EPOCH = 2**52
"""Epochs start as microseconds since 1970 and must stay exact in a double (Lua); this leaves until the year 2112."""


def session_id(value: str) -> str:
    """Return a session id that may become part of a key."""
    return identifier("session_id", value, MAX_SESSION_ID)


def verifier_id(field: str, value: str) -> str:
    """Return a verifier id that may become part of a key."""
    return identifier(field, value, MAX_VERIFIER_ID)


def ticket_bytes(ticket: bytes) -> bytes:
    at_most("bytes of ticket", len(ticket), MAX_TICKET_BYTES)
    return ticket


def open_from_proto(request: pb.OpenSessionRequest) -> PlacementRequest:
    at_most("length of target", len(request.target), MAX_TARGET_TEXT)
    at_most("prompt_tokens", request.prompt_tokens, MAX_PROMPT_TOKENS)
    return PlacementRequest(
        target=request.target,
        prompt_tokens=request.prompt_tokens,
        draft=label("draft_release", request.draft_release),
        traffic=label("traffic_class", request.traffic_class),
        device_id=label("device_id", request.device_id),
    )


def resume_from_proto(request: pb.ResumeSessionRequest) -> tuple[str, bytes, int, PlacementRequest]:
    """Return session id, ticket, the greatest epoch used, and the verifiers that have failed."""
    at_most("entries in failed_verifiers", len(request.failed_verifiers), MAX_FAILED)
    at_most("last_epoch", request.last_epoch, MAX_EPOCH)
    failed = frozenset(verifier_id("failed_verifiers", name) for name in request.failed_verifiers)
    wanted = PlacementRequest(failed=failed)
    return session_id(request.session_id), ticket_bytes(request.ticket), request.last_epoch, wanted


def opened_to_proto(opened: OpenedSession, release_serial: int) -> pb.OpenSessionResponse:
    return pb.OpenSessionResponse(
        session_id=opened.session_id,
        target=target_to_proto(opened.primary.verifier.target),
        primary=_grant_to_proto(opened.primary),
        standby=_grant_to_proto(opened.standby) if opened.standby else None,
        expires_unix=opened.expires_unix,
        prior=_prior_to_proto(opened.prior.acceptance_history),
        release_serial=release_serial,
    )


def offer_from_proto(request: pb.OfferReleaseRequest) -> tuple[str, str]:
    """Return the target's weights hash and the device's id."""
    label("in_use", request.in_use)
    return text("target", request.target, 1, MAX_TARGET_TEXT), label("device_id", request.device_id)


def offer_to_proto(serial: int, release: Release | None, base_url: str) -> pb.OfferReleaseResponse:
    if release is None:
        return pb.OfferReleaseResponse(serial=serial)
    canary = release.state is LifecycleState.CANARY
    return pb.OfferReleaseResponse(serial=serial, manifest=release.manifest, canary=canary, base_url=base_url)


def registration_from_proto(request: pb.RegisterRequest) -> VerifierRegistration:
    at_most("length of address", len(request.address), MAX_ADDRESS)
    _, port = split_address(request.address)
    between("port of address", port, 1, 65_535)
    between("capacity_sessions", request.capacity_sessions, 1, MAX_CAPACITY)
    name, instance = identity_from_proto(request)
    return VerifierRegistration(
        verifier_id=name,
        address=request.address,
        tls=request.tls,
        target=target_from_proto(request.target),
        capacity=request.capacity_sessions,
        instance=instance,
    )


def identity_from_proto(request: pb.RegisterRequest | pb.ReportRequest | pb.DeregisterRequest) -> tuple[str, int]:
    """Return verifier id and instance."""
    name = verifier_id("verifier_id", request.verifier_id)
    if request.instance == 0:
        raise BadRequest.bound("instance", 0, "a random number other than 0, new at each start")
    return name, request.instance


def telemetry_from_proto(request: pb.ReportRequest) -> tuple[VerifierTelemetry, tuple[SessionTelemetry, ...]]:
    """Return the telemetry of a verifier, summed up over its sessions, and of each session."""
    at_most("entries in sessions", len(request.sessions), MAX_LIVE_SESSIONS)
    verifier = verifier_telemetry_from_proto(request.verifier)
    sessions = tuple(map(session_telemetry_from_proto, request.sessions))
    return verifier.with_totals_of(sessions), sessions


def tokens_from_proto(request: pb.ReportRequest) -> dict[str, int]:
    """Return a batch of generated tokens, by tenant."""
    at_most("entries in tenant_tokens", len(request.tenant_tokens), MAX_LIVE_SESSIONS)
    for name, tokens in request.tenant_tokens.items():
        tenant_name(name)
        at_most("tenant_tokens", tokens, MAX_REPORTED_TOKENS)
    return dict(request.tenant_tokens)


def report_to_proto(
    reply: tuple[ReportReply, Sequence[WindowDecision]] | None,
    public_keys: Mapping[str, bytes],
    release_serial: int,
) -> pb.ReportResponse:
    """Encode a reply; None means that the verifier has to register again."""
    if reply is None:
        return pb.ReportResponse(public_keys=public_keys, release_serial=release_serial)
    found, decisions = reply
    return pb.ReportResponse(
        known=True,
        public_keys=public_keys,
        release_serial=release_serial,
        drain=found.drain,
        closed=found.closed,
        revocations=[_revocation_to_proto(one) for one in found.revoked],
        revocations_seen=found.seen,
        store_unix=found.store_unix,
        contended=found.contended,
        exhausted_tenants=found.exhausted,
        directives=[
            pb.SessionDirective(
                session_id=decision.session_id,
                epoch=decision.epoch,
                directive=directive_to_proto(report_adapter.directive(decision, LIMITS)),
            )
            for decision in decisions
        ],
    )


def _revocation_to_proto(revocation: Revocation) -> pb.Revocation:
    field = {"session": "session_id", "api_key": "api_key_id"}[revocation.kind]
    return pb.Revocation(**{field: revocation.name}, until_unix=revocation.until_unix)


def _prior_to_proto(history: bytes) -> pb.Prior | None:
    if not history:
        return None
    first, sibling = history.count(HIT), history.count(SIBLING)
    return pb.Prior(
        first_acceptance=first / len(history),
        sibling_acceptance=sibling / max(1, len(history) - first),
        observations=len(history),
    )


def _grant_to_proto(grant: Grant) -> pb.Grant:
    return pb.Grant(
        verifier_id=grant.verifier.verifier_id,
        address=grant.verifier.address,
        tls=grant.verifier.tls,
        ticket=grant.ticket,
        epoch_first=grant.epoch_first,
        epoch_last=grant.epoch_last,
        limits=limits_to_proto(LIMITS),
    )
