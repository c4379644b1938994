"""Test that timeouts follow what the network shows."""

from __future__ import annotations

from edge_agent.session.adaptive_timeout import MAX_RTT_S, MOST_PATIENT_S, PATIENT, ROUND_TRIPS, AdaptiveTimeout


def test_the_first_wait_is_short_and_the_one_after_a_timeout_long() -> None:
    timeout = AdaptiveTimeout()
    assert timeout.of(2.5) == 2.5
    timeout.expired()
    assert timeout.of(2.5) == 2.5 * PATIENT
    assert timeout.of(10.0) == MOST_PATIENT_S
    assert timeout.of(60.0) == 60.0
    timeout.answered()
    assert timeout.of(2.5) == 2.5


def test_the_wait_after_a_timeout_is_never_shorter_than_the_one_before() -> None:
    timeout = AdaptiveTimeout()
    timeout.measured(8.0)
    before = timeout.of(2.5)
    timeout.expired()
    assert timeout.of(2.5) >= before


def test_the_round_trip_adds_to_every_wait() -> None:
    timeout = AdaptiveTimeout()
    timeout.measured(4.0)
    assert timeout.of(2.5) == 2.5 + ROUND_TRIPS * 4.0
    timeout.measured(1e9)
    assert timeout.of(0.0) == ROUND_TRIPS * MAX_RTT_S
