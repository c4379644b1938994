"""Hold telemetry that comes in against bounds."""

from __future__ import annotations

from outrider.core.acceptance.history import HIT
from outrider.core.errors import between
from outrider.core.protocol.messages import MAX_SESSION_ID
from outrider.wire.bounds import at_most, identifier, is_label, label
from outrider.wire.v1 import telemetry_pb2 as pb

MAX_LIVE_SESSIONS = 8_192
MAX_COST_ENTRIES = 64
"""Entries of a step's cost model."""
MAX_PARTS = 16
"""Parts of a step whose times a verifier reports."""
MAX_PART_NAME = 32
MAX_MEASURE = 1e9
WRONG_CLOCK_S = 10.0
"""Seconds by which a clock may differ from the coordinator's before anybody is told."""
MAX_HISTORY = 1_024
_OUTCOMES = bytes(range(HIT + 1))
MAX_NODES_PER_LEVEL = 16.0
MAX_SERVER_GAIN = 4_096.0
"""Tokens that a verifier's own nodes add to a step: no more than a session may have nodes."""
MAX_COUNT = 2**40
"""Positions or nodes of a session: exact in a double (Lua), as the sum over all sessions is, and more than any has."""


def check_session(message: pb.SessionTelemetry) -> None:
    """Check what a verifier reports of a session. Raises BadRequest for what no verifier measures.

    What a device does or says is no fault of its verifier: names and counts that make no sense are cleared, and many
    siblings become MAX_NODES_PER_LEVEL.
    """
    history = message.acceptance_history
    at_most("bytes of sessions.acceptance_history", len(history), MAX_HISTORY)
    if history.translate(None, _OUTCOMES):
        at_most("a byte of sessions.acceptance_history", max(history), HIT)
    at_most("sessions.evaluated", message.evaluated, MAX_COUNT)
    at_most("sessions.accepted", message.accepted, MAX_COUNT)
    identifier("session_id", message.session_id, MAX_SESSION_ID)
    label("sessions.tenant", message.tenant)
    between("sessions.rtt_ms", message.rtt_ms, 0, MAX_MEASURE)
    between("sessions.draft_ms", message.draft_ms, 0, MAX_MEASURE)
    between("sessions.nodes_per_level", message.nodes_per_level, 0, MAX_MEASURE)
    between("sessions.server_gain", message.server_gain, 0, MAX_SERVER_GAIN)
    message.nodes_per_level = min(message.nodes_per_level, MAX_NODES_PER_LEVEL)
    for name in ("draft_release", "traffic_class"):
        if not is_label(getattr(message, name)):
            message.ClearField(name)
    if not message.first_accepted <= message.positions <= MAX_COUNT:
        message.ClearField("positions")
        message.ClearField("first_accepted")


def check_verifier(message: pb.VerifierTelemetry) -> None:
    """Check what a verifier reports of itself. Raises BadRequest for what no verifier measures."""
    at_most("live_sessions", message.live_sessions, MAX_LIVE_SESSIONS)
    at_most("entries in step_cost_ms", len(message.step_cost_ms), MAX_COST_ENTRIES)
    at_most("entries in timing_ms", len(message.timing_ms), MAX_PARTS)
    between("min_acceptance", message.min_acceptance, 0, 1.0)
    for name in ("step_ms", "tokens_per_s", "node_ms", "session_cost_ms", "rtt_ms"):
        between(name, getattr(message, name), 0, MAX_MEASURE)
    between("clock_ahead_s", message.clock_ahead_s, -MAX_MEASURE, MAX_MEASURE)
    for rows, ms in message.step_cost_ms.items():
        between(f"step_cost_ms of {rows}", ms, 0, MAX_MEASURE)
    for part, ms in message.timing_ms.items():
        at_most("length of a name in timing_ms", len(part), MAX_PART_NAME)
        between(f"timing_ms of {part}", ms, 0, MAX_MEASURE)
