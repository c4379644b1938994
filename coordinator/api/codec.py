"""Protobuf to records and back. Everything inbound is held against a bound here; a refusal names field and value."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence

from coordinator.records import (
    Grant,
    Load,
    Opening,
    PlacementRequest,
    Registration,
    ResumeOrder,
    SessionStats,
    SessionWindow,
)
from coordinator.window import report_adapter
from outrider.core.acceptance.history import HIT, SIBLING
from outrider.core.errors import BadRequest
from outrider.core.protocol.messages import MAX_PROMPT_TOKENS, MAX_SESSION_ID, MAX_VERIFIER_ID, SessionLimits
from outrider.wire.channels import split_address
from outrider.wire.codecs import directive_to_proto
from outrider.wire.ticket import MAX_LABEL, MAX_TICKET_BYTES, target_from_proto, target_to_proto
from outrider.wire.v1 import coordinator_pb2 as pb

MAX_ADDRESS = 255
MAX_KIND_LABEL = 64
MAX_RTTS = 256
MAX_RTT_MS = 60_000.0
MAX_FAILED = 64
MAX_CAPACITY = 4_096
MAX_REPORTED_SESSIONS = 2 * MAX_CAPACITY
MAX_EPOCH = 2**52
"""Epochs start as microseconds since 1970 and must stay exact in a double (Lua); this leaves until the year 2112."""
MAX_KNOTS = 64
MAX_PARTS = 16
"""Of a step, whose times a verifier reports."""
MAX_PART_NAME = 32
MAX_RATE = 1e9
MAX_VERDICTS = 1_024
MOST_PER_LEVEL = 16.0
MAX_POSITIONS = 2**40
"""Of a session: exact in a double (Lua), and more than any makes."""
_VERIFIER_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LABEL = re.compile(r"[A-Za-z0-9._-]{0,64}")
_SESSION_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def need_from_proto(request: pb.OpenSessionRequest) -> PlacementRequest:
    at_most("length of target", len(request.target), MAX_LABEL)
    at_most("prompt_tokens", request.prompt_tokens, MAX_PROMPT_TOKENS)
    return PlacementRequest(
        target=request.target,
        rtt_ms=_rtts(request.rtt_ms),
        draft=_label("draft_release", request.draft_release),
        traffic=_label("traffic_class", request.traffic_class),
    )


def resume_from_proto(request: pb.ResumeSessionRequest) -> ResumeOrder:
    at_most("entries in failed_verifiers", len(request.failed_verifiers), MAX_FAILED)
    at_most("last_epoch", request.last_epoch, MAX_EPOCH)
    return ResumeOrder(
        session_id=session_id(request.session_id),
        ticket=presented(request.ticket),
        failed=frozenset(verifier_id("failed_verifiers", name) for name in request.failed_verifiers),
        last_epoch=request.last_epoch,
        rtt_ms=_rtts(request.rtt_ms),
    )


def session_id(value: str) -> str:
    """A session id that may become part of a key."""
    if not _SESSION_ID.fullmatch(value):
        raise _bad_name("session_id", value, MAX_SESSION_ID)
    return value


def presented(ticket: bytes) -> bytes:
    """A ticket of a size worth looking at."""
    at_most("bytes of ticket", len(ticket), MAX_TICKET_BYTES)
    return ticket


def registration_from_proto(request: pb.RegisterRequest) -> Registration:
    at_most("length of address", len(request.address), MAX_ADDRESS)
    _, port = split_address(request.address)
    _between("port of address", port, 1, 65_535)
    _between("capacity_sessions", request.capacity_sessions, 1, MAX_CAPACITY)
    return Registration(
        verifier_id=verifier_id("verifier_id", request.verifier_id),
        address=request.address,
        tls=request.tls,
        target=target_from_proto(request.target),
        capacity=request.capacity_sessions,
        instance=_instance(request.instance),
    )


def identity_from_proto(request: pb.ReportRequest | pb.DeregisterRequest) -> tuple[str, int]:
    """Verifier id and instance."""
    return verifier_id("verifier_id", request.verifier_id), _instance(request.instance)


def load_from_proto(request: pb.ReportRequest) -> Load:
    at_most("live_sessions", request.live_sessions, MAX_REPORTED_SESSIONS)
    return Load(
        live_sessions=request.live_sessions,
        step_ms=_measure("step_ms", request.step_ms, MAX_RATE),
        kv_used=request.kv_used,
        kv_capacity=request.kv_capacity,
        tokens_per_s=_measure("tokens_per_s", request.tokens_per_s, MAX_RATE),
        draining=request.draining,
        node_ms=_measure("node_ms", request.node_ms, MAX_RATE),
        timing_ms=_timing(request.timing_ms),
        step_cost_ms=_step_cost(request.step_cost_ms),
        session_cost_ms=_measure("session_cost_ms", request.session_cost_ms, MAX_RATE),
        min_acceptance=_measure("min_acceptance", request.min_acceptance, 1.0),
        evaluated=sum(session.evaluated for session in request.sessions),
        accepted=sum(session.accepted for session in request.sessions),
        rtt_ms=_typical([_measure("sessions.rtt_ms", session.rtt_ms, MAX_RATE) for session in request.sessions]),
    )


def _typical(rtts_ms: Sequence[float]) -> float:
    """The median of those that are measured; 0 where none is."""
    return statistics.median([rtt_ms for rtt_ms in rtts_ms if rtt_ms] or [0.0])


def _timing(timing_ms: Mapping[str, float]) -> dict[str, float]:
    at_most("entries in timing_ms", len(timing_ms), MAX_PARTS)
    for part in timing_ms:
        at_most("length of a name in timing_ms", len(part), MAX_PART_NAME)
    return {part: _measure(f"timing_ms of {part}", ms, MAX_RATE) for part, ms in sorted(timing_ms.items())}


def _step_cost(step_cost_ms: Mapping[int, float]) -> dict[int, float]:
    at_most("entries in step_cost_ms", len(step_cost_ms), MAX_KNOTS)
    return {rows: _measure(f"step_cost_ms of {rows}", ms, MAX_RATE) for rows, ms in sorted(step_cost_ms.items())}


def sessions_from_proto(request: pb.ReportRequest) -> tuple[SessionStats, ...]:
    at_most("entries in sessions", len(request.sessions), MAX_REPORTED_SESSIONS)
    return tuple(_session_stats(request.verifier_id, report) for report in request.sessions)


def opening_to_proto(opening: Opening, release_serial: int) -> pb.OpenSessionResponse:
    return pb.OpenSessionResponse(
        session_id=opening.session_id,
        target=target_to_proto(opening.target),
        primary=_grant_to_proto(opening.primary),
        standby=_grant_to_proto(opening.standby) if opening.standby else None,
        expires_unix=opening.expires_unix,
        prior=_prior_to_proto(opening.prior.verdicts),
        release_serial=release_serial,
    )


def _prior_to_proto(verdicts: bytes) -> pb.Prior | None:
    if not verdicts:
        return None
    right, caught = verdicts.count(HIT), verdicts.count(SIBLING)
    wrong = len(verdicts) - right
    return pb.Prior(first=right / len(verdicts), sibling=caught / max(1, wrong), observations=len(verdicts))


def session_directive_to_proto(window: SessionWindow, limits: SessionLimits) -> pb.SessionDirective:
    told = directive_to_proto(report_adapter.directive(window, limits))
    return pb.SessionDirective(session_id=window.session_id, epoch=window.epoch, directive=told)


def _grant_to_proto(grant: Grant) -> pb.Grant:
    return pb.Grant(
        verifier_id=grant.seat.verifier_id,
        address=grant.seat.address,
        tls=grant.seat.tls,
        ticket=grant.ticket,
        epoch_first=grant.epoch_first,
        epoch_last=grant.epoch_last,
        numerics_class=grant.seat.target.numerics_class,
    )


def _session_stats(verifier_id: str, report: pb.SessionReport) -> SessionStats:
    _label("sessions.tenant", report.tenant)
    positions, right = _judged(report)
    return SessionStats(
        session_id=session_id(report.session_id),
        tenant=report.tenant,
        verifier_id=verifier_id,
        epoch=report.epoch,
        steps=report.steps,
        committed=report.committed,
        evaluated=report.evaluated,
        accepted=report.accepted,
        rtt_ms=_measure("sessions.rtt_ms", report.rtt_ms, MAX_RATE),
        verdicts=_verdicts(report.verdicts),
        draft_ms=_measure("sessions.draft_ms", report.draft_ms, MAX_RATE),
        # 0 by a verifier that does not tell; how many there are is the device's doing, and no fault of the report
        nodes_per_level=min(_measure("sessions.nodes_per_level", report.nodes_per_level, MAX_RATE), MOST_PER_LEVEL),
        draft=report.draft_release if _LABEL.fullmatch(report.draft_release) else "",
        traffic=report.traffic_class if _LABEL.fullmatch(report.traffic_class) else "",
        positions=positions,
        right=right,
    )


def _judged(report: pb.SessionReport) -> tuple[int, int]:
    """What a device does and says is no fault of the report: counts that cannot be are none, as is a name above."""
    return (report.positions, report.right) if report.right <= report.positions <= MAX_POSITIONS else (0, 0)


def _verdicts(verdicts: bytes) -> bytes:
    at_most("bytes of sessions.verdicts", len(verdicts), MAX_VERDICTS)
    at_most("a byte of sessions.verdicts", max(verdicts, default=0), HIT)
    return verdicts


def _rtts(rtt_ms: Mapping[str, float]) -> dict[str, float]:
    at_most("entries in rtt_ms", len(rtt_ms), MAX_RTTS)
    return {verifier_id("rtt_ms", name): _measure("rtt_ms", value, MAX_RTT_MS) for name, value in rtt_ms.items()}


def verifier_id(field: str, value: str) -> str:
    if not _VERIFIER_ID.fullmatch(value):
        raise _bad_name(field, value, MAX_VERIFIER_ID)
    return value


def _label(field: str, value: str) -> str:
    if not _LABEL.fullmatch(value):
        raise BadRequest.bound(
            field, repr(value[:MAX_KIND_LABEL]), f"at most {MAX_KIND_LABEL} letters, digits, '.', '_' or '-'"
        )
    return value


def _instance(value: int) -> int:
    if value == 0:
        raise BadRequest.bound("instance", 0, "a random number other than 0, new at each start")
    return value


def _bad_name(field: str, value: str, most: int) -> BadRequest:
    return BadRequest.bound(field, repr(value[:most]), f"1 to {most} letters, digits, '.', '_' or '-'")


def _measure(field: str, value: float, most: float) -> float:
    if not (math.isfinite(value) and 0 <= value <= most):
        raise BadRequest.bound(field, value, f"between 0 and {most:g}")
    return value


def at_most(field: str, value: int, most: int) -> None:
    if value > most:
        raise BadRequest.bound(field, value, f"at most {most}")


def _between(field: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise BadRequest.bound(field, value, f"between {low} and {high}")
