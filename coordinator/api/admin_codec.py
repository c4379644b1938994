"""Convert the calls of operators to records and back. Everything inbound is held against a bound here."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from coordinator.api.authentication import tenant_name
from coordinator.api.codec import session_id, verifier_id
from coordinator.api.tenant_keys import Tenant
from coordinator.config import MAX_OPENS, MAX_PLACES, MAX_STREAMS, MAX_TOKENS
from coordinator.records import (
    MAX_DRAFT_WAIT_MS,
    MAX_LEVELS,
    MAX_PER_LEVEL,
    SessionStatus,
    VerifierStatus,
    Window,
    WindowBounds,
    WindowDecision,
)
from coordinator.releases.records import CanaryEvidence, LifecycleState, Release, ReleaseAction
from outrider.core.errors import BadRequest
from outrider.wire.bounds import at_most
from outrider.wire.telemetry import session_telemetry_to_proto, verifier_telemetry_to_proto
from outrider.wire.ticket import target_to_proto
from outrider.wire.v1 import coordinator_pb2 as pb

DEFAULT_PAGE = 500
MAX_PAGE = 1_000
"""Entries of one answer: half a megabyte."""
_MOST: Mapping[Literal["max_places", "opens_per_minute", "tokens_per_minute", "max_streams"], int] = {
    "max_places": MAX_PLACES,
    "opens_per_minute": MAX_OPENS,
    "tokens_per_minute": MAX_TOKENS,
    "max_streams": MAX_STREAMS,
}
_HASH_BEGINNING = re.compile(r"(sha256:)?[0-9a-f]{1,64}")
_VERIFIER_ACTIONS = {
    pb.VerifierAction.Value(f"VERIFIER_ACTION_{action.upper()}"): action for action in ("cordon", "uncordon", "drain")
}
_RELEASE_ACTIONS = {pb.ReleaseAction.Value(f"RELEASE_ACTION_{action.name}"): action for action in ReleaseAction}


def verifiers_query(request: pb.ListVerifiersRequest) -> tuple[str, str, int]:
    """Return which verifier ("" is all), the id before the page, and the entries of a page."""
    one = verifier_id("verifier_id", request.verifier_id) if request.verifier_id else ""
    after = verifier_id("after", request.after) if request.after else ""
    return one, after, _limit(request.limit)


def verifier_action_from_proto(request: pb.UpdateVerifierRequest) -> tuple[str, str]:
    """Return verifier id, and `cordon`, `uncordon` or `drain`."""
    action = _VERIFIER_ACTIONS.get(request.action)
    if action is None:
        raise BadRequest.bound("action", request.action, "CORDON, UNCORDON or DRAIN")
    return verifier_id("verifier_id", request.verifier_id), action


def sessions_query(request: pb.ListSessionsRequest) -> tuple[str, str, tuple[str, str], int]:
    """Return the verifier and the tenant that are asked for ("" is any), (verifier, session) before the page, and the
    entries of a page."""
    of_verifier = verifier_id("verifier_id", request.verifier_id) if request.verifier_id else ""
    of_tenant = tenant_name(request.tenant) if request.tenant else ""
    after = "", ""
    if request.after:
        last_verifier, _, last_session = request.after.partition("/")
        after = verifier_id("after", last_verifier), session_id(last_session)
    return of_verifier, of_tenant, after, _limit(request.limit)


def tenants_query(request: pb.ListTenantsRequest) -> tuple[str, int]:
    """Return the name before the page, and the entries of a page."""
    return tenant_name(request.after) if request.after else "", _limit(request.limit)


def verifier_to_proto(verifier: VerifierStatus) -> pb.VerifierStatus:
    registration = verifier.registration
    return pb.VerifierStatus(
        verifier_id=registration.verifier_id,
        address=registration.address,
        target=target_to_proto(registration.target),
        capacity_sessions=registration.capacity,
        lease_s=verifier.lease_s,
        cordoned=verifier.cordoned,
        telemetry=verifier_telemetry_to_proto(verifier.telemetry),
    )


def session_to_proto(session: SessionStatus) -> pb.SessionStatus:
    return pb.SessionStatus(
        telemetry=session_telemetry_to_proto(session.telemetry),
        verifier_id=session.verifier_id,
        standby=session.standby,
        reported=session.reported,
    )


def tenant_to_proto(tenant: Tenant) -> pb.Tenant:
    limits, use = pb.TenantLimits(**vars(tenant.limits)), pb.TenantUse(**tenant.use)
    return pb.Tenant(**(vars(tenant) | {"limits": limits, "use": use}))  # fields have the same names in both


def limits_from_proto(limits: pb.TenantLimits) -> dict[str, int]:
    """Return the limits that are to be set, by their names."""
    found: dict[str, int] = {}
    for name, most in _MOST.items():
        if limits.HasField(name):
            found[name] = getattr(limits, name)
            at_most(f"limits.{name}", found[name], most)
    return found


def bounds_from_proto(request: pb.SetWindowBoundsRequest) -> tuple[str, WindowBounds | None]:
    """Return the session ("" is every other one), and its bounds; None removes them."""
    of = session_id(request.session_id) if request.session_id else ""
    if not request.HasField("bounds"):
        return of, None
    window = _window_from_proto(request.bounds.window)
    at_most("bounds.depth", window.depth, MAX_LEVELS)
    if window.k > window.depth:
        raise BadRequest.bound(
            "bounds.k", window.k, f"at most bounds.depth, {window.depth}: a step takes what is there"
        )
    wait_ms, per_level = window.draft_wait_ms, window.nodes_per_level
    if wait_ms is not None and not 0.0 <= wait_ms <= MAX_DRAFT_WAIT_MS:
        raise BadRequest.bound("bounds.draft_wait_ms", wait_ms, f"between 0 and {MAX_DRAFT_WAIT_MS}")
    if per_level is not None and not 1.0 <= per_level <= MAX_PER_LEVEL:
        raise BadRequest.bound("bounds.nodes_per_level", per_level, f"between 1 and {MAX_PER_LEVEL}")
    return of, WindowBounds(window, request.bounds.pinned)


def windows_to_proto(
    decisions: Sequence[WindowDecision], bounds: Mapping[str, WindowBounds], total: int
) -> pb.ListWindowsResponse:
    """Encode windows. bounds: by session id, "" for all others. total: decisions, with those that are left out."""
    return pb.ListWindowsResponse(
        windows=[_decision_to_proto(one, bounds.get(one.session_id)) for one in decisions],
        default_bounds=_bounds_to_proto(bounds[""]) if "" in bounds else None,
        total=total,
    )


def release_to_proto(release: Release) -> pb.Release:
    return pb.Release(
        manifest=release.manifest,
        state=state_to_proto(release.state),
        share=release.share,
        since_unix=release.since_unix,
        reason=release.reason,
        pinned=release.pinned,
        evidence=_evidence_to_proto(release.evidence) if release.evidence else None,
    )


def state_to_proto(state: LifecycleState) -> pb.ReleaseState:
    value: pb.ReleaseState = getattr(pb, f"RELEASE_STATE_{state.name}")
    return value


def hash_beginning(value: str) -> str:
    """Return the beginning of a release's hash. Raises BadRequest for anything else."""
    if not _HASH_BEGINNING.fullmatch(value):
        raise BadRequest.bound("release", repr(value[:80]), "1 to 64 hex digits, the beginning of the hash of its file")
    return value


def release_action_from_proto(request: pb.UpdateReleaseRequest) -> tuple[str, ReleaseAction]:
    """Return the beginning of a release's hash and the operator's action."""
    action = _RELEASE_ACTIONS.get(request.action)
    if action is None:
        raise BadRequest.bound("action", request.action, "PROMOTE, ROLL_BACK, PIN or UNPIN")
    return hash_beginning(request.release), action


def _evidence_to_proto(evidence: CanaryEvidence) -> pb.ReleaseEvidence:
    return pb.ReleaseEvidence(**{f.name: getattr(evidence, f.name) for f in pb.ReleaseEvidence.DESCRIPTOR.fields})


def _decision_to_proto(decision: WindowDecision, bounds: WindowBounds | None) -> pb.WindowDecision:
    fields = {**vars(decision), "window": _window_to_proto(decision.window)}  # fields have the same names in both
    del fields["step_ms"]  # of the verifier, whose own telemetry is shown
    return pb.WindowDecision(**fields, bounds=_bounds_to_proto(bounds) if bounds else None)


def _bounds_to_proto(bounds: WindowBounds) -> pb.WindowBounds:
    return pb.WindowBounds(window=_window_to_proto(bounds.window), pinned=bounds.pinned)


def _window_to_proto(window: Window) -> pb.Window:
    return pb.Window(**vars(window))  # fields have the same names in both, and None is absent


def _window_from_proto(window: pb.Window) -> Window:
    return Window(
        window.k,
        window.depth,
        window.draft_wait_ms if window.HasField("draft_wait_ms") else None,
        window.nodes_per_level if window.HasField("nodes_per_level") else None,
    )


def _limit(limit: int) -> int:
    """Return the entries of a page; 0 asks for the usual number."""
    at_most("limit", limit, MAX_PAGE)
    return limit or DEFAULT_PAGE
