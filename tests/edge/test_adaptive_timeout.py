"""Test that timeouts follow what the network shows."""

from __future__ import annotations

from edge_agent.session.adaptive_timeout import (
    BYTES_PER_S,
    MAX_RTT_S,
    MOST_PATIENT_S,
    ROUND_TRIPS,
    SLOW_BYTES_PER_S,
    AdaptiveTimeout,
)


def test_waits_double_until_an_answer_comes_and_the_round_trip_adds_to_each() -> None:
    timeout = AdaptiveTimeout()
    waits = []
    for _ in range(5):
        waits.append(timeout.of(2.5))
        for _ in range(20):  # calls that have waited together count once
            timeout.expired(2.5, waits[-1])
    assert waits == [2.5, 5.0, 10.0, 20.0, 20.0] and timeout.of(60.0) == 60.0
    timeout.answered()
    timeout.measured(0.5)
    assert timeout.of(2.5) == 2.5 + ROUND_TRIPS * 0.5
    timeout.measured(1e9)
    assert timeout.of(0.0) == ROUND_TRIPS * MAX_RTT_S > MOST_PATIENT_S


def test_a_long_message_has_its_time_on_a_slow_uplink() -> None:
    timeout = AdaptiveTimeout()
    assert timeout.of_bytes(BYTES_PER_S) == 1.0
    timeout.expired(2.5, 2.5)
    assert timeout.of_bytes(SLOW_BYTES_PER_S) == 1.0
