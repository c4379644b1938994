"""Test that what the engine measures passes the bounds of telemetry, and what no verifier measures is refused."""

from __future__ import annotations

import dataclasses

import pytest

from outrider.core.acceptance.history import HIT, MISS, SIBLING
from outrider.core.telemetry import SessionTelemetry, VerifierTelemetry
from outrider.wire import telemetry as codec

SESSION = SessionTelemetry(
    "s",
    7,
    "acme",
    10,
    25,
    40,
    9,
    12.5,
    bytes([HIT, MISS, SIBLING]),
    2.5,
    1.5,
    "d" * 64,
    "code",
    30,
    20,
    3,
    4,
    True,
    0.7,
)
VERIFIER = VerifierTelemetry(
    2, True, 12.0, 80.0, 5, 10, 0.25, 0.5, {1: 9.5, 8: 10.0}, 0.25, {"forward": 8.0}, 40, 9, 20.0
)


def test_what_the_engine_measures_passes_the_bounds_with_every_field() -> None:
    session, verifier = codec.session_telemetry_to_proto(SESSION), codec.verifier_telemetry_to_proto(VERIFIER)
    codec.check_session(session)
    codec.check_verifier(verifier)
    for ours, theirs in ((SESSION, session), (VERIFIER, verifier)):
        assert {field.name for field in dataclasses.fields(ours)} == set(theirs.DESCRIPTOR.fields_by_name)
        assert all(vars(ours).values())  # so that no field is left out unseen
        assert all(getattr(theirs, name) == value for name, value in vars(ours).items())


@pytest.mark.parametrize(
    ("change", "cleaned"),
    [
        ({"nodes_per_level": 500.0}, {"nodes_per_level": codec.MAX_NODES_PER_LEVEL}),
        ({"draft_release": "a:b"}, {"draft_release": ""}),
        ({"traffic_class": "x" * 65}, {"traffic_class": ""}),
        ({"positions": 3, "first_accepted": 4}, {"positions": 0, "first_accepted": 0}),
        ({"positions": 2**41, "first_accepted": 1}, {"positions": 0, "first_accepted": 0}),
    ],
)
def test_what_a_device_does_is_no_fault_of_the_report(change, cleaned) -> None:
    message = codec.session_telemetry_to_proto(dataclasses.replace(SESSION, **change))
    codec.check_session(message)
    assert message == codec.session_telemetry_to_proto(dataclasses.replace(SESSION, **cleaned))
