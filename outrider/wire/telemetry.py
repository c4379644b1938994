"""Convert telemetry to protobuf and back; everything inbound is held against a bound."""

from __future__ import annotations

from outrider.core.acceptance.history import HIT
from outrider.core.protocol.messages import MAX_SESSION_ID
from outrider.core.telemetry import SessionTelemetry, VerifierTelemetry
from outrider.wire.bounds import at_most, identifier, is_label, label, measure
from outrider.wire.codecs import built
from outrider.wire.v1 import telemetry_pb2 as pb

MAX_LIVE_SESSIONS = 8_192
MAX_COST_ENTRIES = 64
"""Entries of a step's cost model."""
MAX_PARTS = 16
"""Parts of a step whose times a verifier reports."""
MAX_PART_NAME = 32
MAX_MEASURE = 1e9
MAX_HISTORY = 1_024
_OUTCOMES = bytes(range(HIT + 1))
MAX_NODES_PER_LEVEL = 16.0
MAX_SERVER_GAIN = 4_096.0
"""Tokens that a verifier's own nodes add to a step: no more than a session may have nodes."""
MAX_COUNT = 2**40
"""Positions or nodes of a session: exact in a double (Lua), as the sum over all sessions is, and more than any has."""


def session_telemetry_to_proto(session: SessionTelemetry) -> pb.SessionTelemetry:
    return pb.SessionTelemetry(**vars(session))  # fields have the same names and types in both


def session_telemetry_from_proto(message: pb.SessionTelemetry) -> SessionTelemetry:
    """Decode the message. Raises BadRequest for what no verifier measures.

    What a device does or says is no fault of its verifier: names and counts that make no sense come out empty, and many
    siblings as MAX_NODES_PER_LEVEL.
    """
    history = message.acceptance_history
    at_most("bytes of sessions.acceptance_history", len(history), MAX_HISTORY)
    if history.translate(None, _OUTCOMES):
        at_most("a byte of sessions.acceptance_history", max(history), HIT)
    for name in ("evaluated", "accepted"):
        at_most(f"sessions.{name}", getattr(message, name), MAX_COUNT)
    per_level = measure("sessions.nodes_per_level", message.nodes_per_level, MAX_MEASURE)
    counted = message.first_accepted <= message.positions <= MAX_COUNT
    return built(
        SessionTelemetry,
        message,
        session_id=identifier("session_id", message.session_id, MAX_SESSION_ID),
        tenant=label("sessions.tenant", message.tenant),
        rtt_ms=measure("sessions.rtt_ms", message.rtt_ms, MAX_MEASURE),
        draft_ms=measure("sessions.draft_ms", message.draft_ms, MAX_MEASURE),
        nodes_per_level=min(per_level, MAX_NODES_PER_LEVEL),
        server_gain=measure("sessions.server_gain", message.server_gain, MAX_SERVER_GAIN),
        draft_release=message.draft_release if is_label(message.draft_release) else "",
        traffic_class=message.traffic_class if is_label(message.traffic_class) else "",
        positions=message.positions if counted else 0,
        first_accepted=message.first_accepted if counted else 0,
    )


def verifier_telemetry_to_proto(verifier: VerifierTelemetry) -> pb.VerifierTelemetry:
    return pb.VerifierTelemetry(**vars(verifier))


def verifier_telemetry_from_proto(message: pb.VerifierTelemetry) -> VerifierTelemetry:
    """Decode the message. Raises BadRequest for what no verifier measures."""
    at_most("live_sessions", message.live_sessions, MAX_LIVE_SESSIONS)
    at_most("entries in step_cost_ms", len(message.step_cost_ms), MAX_COST_ENTRIES)
    at_most("entries in timing_ms", len(message.timing_ms), MAX_PARTS)
    for part in message.timing_ms:
        at_most("length of a name in timing_ms", len(part), MAX_PART_NAME)
    costs, parts = sorted(message.step_cost_ms.items()), sorted(message.timing_ms.items())
    measure("min_acceptance", message.min_acceptance, 1.0)
    for name in ("step_ms", "tokens_per_s", "node_ms", "session_cost_ms", "rtt_ms"):
        measure(name, getattr(message, name), MAX_MEASURE)
    return built(
        VerifierTelemetry,
        message,
        step_cost_ms={rows: measure(f"step_cost_ms of {rows}", ms, MAX_MEASURE) for rows, ms in costs},
        timing_ms={part: measure(f"timing_ms of {part}", ms, MAX_MEASURE) for part, ms in parts},
    )
