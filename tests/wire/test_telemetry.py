"""Test that what the engine measures passes the bounds of telemetry, and what a device does spoils no report."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.core.acceptance.history import HIT, MISS, SIBLING
from outrider.wire import telemetry
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry, VerifierTelemetry


def session(**changes: Any) -> SessionTelemetry:
    measured = {
        "session_id": "s",
        "tenant": "acme",
        "evaluated": 40,
        "accepted": 9,
        "rtt_ms": 12.5,
        "acceptance_history": bytes([HIT, MISS, SIBLING]),
        "nodes_per_level": 1.5,
        "draft_release": "d" * 64,
        "traffic_class": "code",
        "positions": 30,
        "first_accepted": 20,
        "server_gain": 0.7,
    }
    return SessionTelemetry(**measured | changes)


def test_what_the_engine_measures_passes_unchanged() -> None:
    measured = session()
    telemetry.check_session(measured)
    assert measured == session()
    telemetry.check_verifier(
        VerifierTelemetry(step_ms=12.0, min_acceptance=0.25, step_cost_ms={1: 9.5, 8: 10.0}, timing_ms={"forward": 8.0})
    )


@pytest.mark.parametrize(
    ("change", "cleaned"),
    [
        ({"nodes_per_level": 500.0}, {"nodes_per_level": telemetry.MAX_NODES_PER_LEVEL}),
        ({"draft_release": "a:b"}, {"draft_release": ""}),
        ({"traffic_class": "x" * 65}, {"traffic_class": ""}),
        ({"positions": 3, "first_accepted": 4}, {"positions": 0, "first_accepted": 0}),
        ({"positions": 2**41, "first_accepted": 1}, {"positions": 0, "first_accepted": 0}),
    ],
)
def test_what_a_device_does_is_no_fault_of_the_report(change: dict[str, Any], cleaned: dict[str, Any]) -> None:
    message = session(**change)
    telemetry.check_session(message)
    assert message == session(**cleaned)
