"""What operators ask and are told: protobuf to records and back, as `codec` does for devices and verifiers."""

from __future__ import annotations

from coordinator.api.admin_handlers import SessionsAsked
from coordinator.api.authentication import tenant_name
from coordinator.api.codec import session_id, verifier_id
from coordinator.api.tenant_keys import Tenant
from coordinator.records import (
    MAX_DRAFT_WAIT_MS,
    MAX_LEVELS,
    MAX_PER_LEVEL,
    Fleet,
    SessionStatus,
    VerifierStatus,
    Window,
    WindowBounds,
    WindowDecision,
    Windows,
)
from outrider.core.errors import BadRequest
from outrider.wire.bounds import at_most
from outrider.wire.telemetry import session_telemetry_to_proto, verifier_telemetry_to_proto
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
        sessions=map(session_to_proto, fleet.sessions),
        store=fleet.store,
        uptime_s=fleet.uptime_s,
        total_verifiers=fleet.total_verifiers,
        total_sessions=fleet.total_sessions,
    )


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
    window = _window_from_proto(bounds.window)
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
    return of, WindowBounds(window, bounds.pinned)


def windows_to_proto(windows: Windows) -> pb.ShowWindowsResponse:
    everybody = windows.bounds.get("")
    return pb.ShowWindowsResponse(
        windows=[_decision_to_proto(one, windows.bounds.get(one.session_id)) for one in windows.decided],
        everybody=_bounds_to_proto(everybody) if everybody else None,
        total=windows.total,
    )


def _decision_to_proto(decision: WindowDecision, bounds: WindowBounds | None) -> pb.WindowDecision:
    return pb.WindowDecision(
        session_id=decision.session_id,
        verifier_id=decision.verifier_id,
        window=_window_to_proto(decision.window),
        min_acceptance=decision.min_acceptance,
        speedup=decision.speedup,
        tokens_per_step=decision.tokens_per_step,
        reason=decision.reason,
        rtt_ms=decision.rtt_ms,
        draft_ms=decision.draft_ms,
        observations=decision.observations,
        first_acceptance=decision.first_acceptance,
        bounds=_bounds_to_proto(bounds) if bounds else None,
    )


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
