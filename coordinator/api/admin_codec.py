"""What operators ask and are told: protobuf to records and back, as `codec` does for devices and verifiers."""

from __future__ import annotations

from coordinator.api.admin_handlers import SessionsAsked
from coordinator.api.authentication import tenant_name
from coordinator.api.codec import at_most, session_id, verifier_id
from coordinator.api.tenant_keys import Tenant
from coordinator.records import (
    MAX_DRAFT_WAIT_MS,
    MAX_LEVELS,
    MAX_PER_LEVEL,
    Fleet,
    SessionStatus,
    SessionWindow,
    Verifier,
    WindowBounds,
    Windows,
)
from outrider.core.errors import BadRequest
from outrider.wire.ticket import target_to_proto
from outrider.wire.v1 import coordinator_pb2 as pb

DEFAULT_PAGE = 500
MAX_PAGE = 1_000
"""Entries of one answer: half a megabyte."""
_ORDERS = {
    pb.VERIFIER_ORDER_CORDON: "cordon",
    pb.VERIFIER_ORDER_UNCORDON: "uncordon",
    pb.VERIFIER_ORDER_DRAIN: "drain",
}


def page_from_proto(limit: int) -> int:
    """Entries of a page; 0 asks for the usual number."""
    at_most("limit", limit, MAX_PAGE)
    return limit or DEFAULT_PAGE


def verifiers_asked(request: pb.ListVerifiersRequest) -> tuple[str, str, int]:
    """Which one ("" is all), after whom, and how many."""
    one = verifier_id("verifier_id", request.verifier_id) if request.verifier_id else ""
    after = verifier_id("after", request.after) if request.after else ""
    return one, after, page_from_proto(request.limit)


def order_from_proto(request: pb.SteerVerifierRequest) -> tuple[str, str]:
    """Verifier id, and `cordon`, `uncordon` or `drain`."""
    order = _ORDERS.get(request.order)
    if order is None:
        raise BadRequest.bound("order", request.order, "CORDON, UNCORDON or DRAIN")
    return verifier_id("verifier_id", request.verifier_id), order


def sessions_asked(request: pb.ListSessionsRequest) -> SessionsAsked:
    of_verifier, slash, of_session = request.after.partition("/")
    return SessionsAsked(
        session_id=session_id(request.session_id) if request.session_id else "",
        verifier_id=verifier_id("verifier_id", request.verifier_id) if request.verifier_id else "",
        tenant=tenant_name(request.tenant) if request.tenant else "",
        after=(verifier_id("after", of_verifier), session_id(of_session)) if request.after or slash else None,
        limit=page_from_proto(request.limit),
    )


def tenants_asked(request: pb.ListTenantsRequest) -> tuple[str, int]:
    """After whom, and how many."""
    return tenant_name(request.after) if request.after else "", page_from_proto(request.limit)


def fleet_to_proto(fleet: Fleet) -> pb.StatusResponse:
    return pb.StatusResponse(
        verifiers=map(verifier_to_proto, fleet.verifiers),
        sessions=map(seated_to_proto, fleet.sessions),
        store=fleet.store,
        uptime_s=fleet.uptime_s,
        total_verifiers=fleet.total_verifiers,
        total_sessions=fleet.total_sessions,
    )


def verifier_to_proto(verifier: Verifier) -> pb.VerifierStatus:
    registration, load = verifier.registration, verifier.load
    return pb.VerifierStatus(
        verifier_id=registration.verifier_id,
        address=registration.address,
        target=target_to_proto(registration.target),
        capacity_sessions=registration.capacity,
        live_sessions=load.live_sessions,
        step_ms=load.step_ms,
        tokens_per_s=load.tokens_per_s,
        lease_s=verifier.lease_s,
        draining=load.draining,
        cordoned=verifier.cordoned,
        kv_used=load.kv_used,
        kv_capacity=load.kv_capacity,
        node_ms=load.node_ms,
        timing_ms=load.timing_ms,
        step_cost_ms=load.step_cost_ms,
        session_cost_ms=load.session_cost_ms,
        min_acceptance=load.min_acceptance,
        evaluated=load.evaluated,
        accepted=load.accepted,
        rtt_ms=load.rtt_ms,
    )


def seated_to_proto(seated: SessionStatus) -> pb.SessionStatus:
    stats = seated.stats
    return pb.SessionStatus(
        session_id=stats.session_id,
        tenant=stats.tenant,
        verifier_id=stats.verifier_id,
        epoch=stats.epoch,
        committed=stats.committed,
        tokens_per_step=stats.committed / stats.steps if stats.steps else 0.0,
        rtt_ms=stats.rtt_ms,
        reported=seated.reported,
        evaluated=stats.evaluated,
        accepted=stats.accepted,
        standby=seated.standby,
        draft_release=stats.draft,
        traffic_class=stats.traffic,
    )


def tenant_to_proto(tenant: Tenant) -> pb.Tenant:
    return pb.Tenant(
        name=tenant.name,
        created_unix=tenant.created_unix,
        revoked_unix=tenant.revoked_unix,
        configured=tenant.configured,
    )


def bounds_from_proto(request: pb.BoundWindowRequest) -> tuple[str, WindowBounds | None]:
    """Of which session ("" is every other one), and its bounds; None lifts them."""
    of = session_id(request.session_id) if request.session_id else ""
    if not request.HasField("bounds"):
        return of, None
    bounds = request.bounds
    at_most("bounds.depth", bounds.depth, MAX_LEVELS)
    if bounds.k > bounds.depth:
        raise BadRequest.bound(
            "bounds.k", bounds.k, f"at most bounds.depth, {bounds.depth}: a step takes what is there"
        )
    draft_wait_ms = bounds.draft_wait_ms if bounds.HasField("draft_wait_ms") else None
    if draft_wait_ms is not None and not 0.0 <= draft_wait_ms <= MAX_DRAFT_WAIT_MS:
        raise BadRequest.bound("bounds.draft_wait_ms", draft_wait_ms, f"between 0 and {MAX_DRAFT_WAIT_MS}")
    per_level = bounds.nodes_per_level if bounds.HasField("nodes_per_level") else None
    if per_level is not None and not 1.0 <= per_level <= MAX_PER_LEVEL:
        raise BadRequest.bound("bounds.nodes_per_level", per_level, f"between 1 and {MAX_PER_LEVEL}")
    return of, WindowBounds(bounds.k, bounds.depth, bounds.pinned, draft_wait_ms, per_level)


def windows_to_proto(windows: Windows) -> pb.ShowWindowsResponse:
    everybody = windows.bounds.get("")
    return pb.ShowWindowsResponse(
        windows=[_window_to_proto(window, windows.bounds.get(window.session_id)) for window in windows.decided],
        everybody=_bounds_to_proto(everybody) if everybody else None,
        total=windows.total,
    )


def _window_to_proto(window: SessionWindow, bounds: WindowBounds | None) -> pb.SessionWindow:
    return pb.SessionWindow(
        session_id=window.session_id,
        verifier_id=window.verifier_id,
        k=window.k,
        depth=window.depth,
        draft_wait_ms=window.draft_wait_ms,
        min_acceptance=window.min_acceptance,
        speedup=window.speedup,
        reason=window.reason,
        rtt_ms=window.rtt_ms,
        draft_ms=window.draft_ms,
        verdicts=window.verdicts,
        hits=window.hits,
        bounds=_bounds_to_proto(bounds) if bounds else None,
        tokens_per_step=window.tokens_per_step,
        nodes_per_level=window.nodes_per_level,
    )


def _bounds_to_proto(bounds: WindowBounds) -> pb.WindowBounds:
    return pb.WindowBounds(
        k=bounds.k,
        depth=bounds.depth,
        pinned=bounds.pinned,
        draft_wait_ms=bounds.draft_wait_ms,
        nodes_per_level=bounds.nodes_per_level,
    )
