"""Test that timeouts follow what the network shows."""

from __future__ import annotations

from edge_agent.session.adaptive_timeout import (
    BYTES_PER_S,
    MAX_RTT_S,
    MOST_PATIENT_S,
    PATIENT,
    ROUND_TRIPS,
    SLOW_BYTES_PER_S,
    AdaptiveTimeout,
)


def expire(timeout: AdaptiveTimeout, base_s: float) -> float:
    """Wait in vain once, and return the next wait."""
    timeout.expired(base_s, timeout.of(base_s))
    return timeout.of(base_s)


def test_where_nothing_is_known_the_first_wait_is_short_and_the_next_one_long() -> None:
    timeout = AdaptiveTimeout()
    assert timeout.of(2.5) == 2.5
    assert expire(timeout, 2.5) == 2.5 * PATIENT
    assert timeout.of(10.0) == MOST_PATIENT_S
    assert timeout.of(60.0) == 60.0
    timeout.answered(0.1)
    assert timeout.of(2.5) == 2.5


def test_where_the_last_answer_was_fast_waits_double() -> None:
    timeout = AdaptiveTimeout()
    timeout.answered(0.1)
    assert [expire(timeout, 2.5) for _ in range(4)] == [5.0, 10.0, 20.0, 20.0]
    timeout.answered(6.0)
    assert expire(timeout, 2.5) == 2.5 * PATIENT


def test_calls_that_have_waited_together_count_once() -> None:
    timeout = AdaptiveTimeout()
    timeout.answered(0.1)
    for _ in range(20):
        timeout.expired(2.5, 2.5)
    assert timeout.of(2.5) == 5.0


def test_the_round_trip_adds_to_every_wait() -> None:
    timeout = AdaptiveTimeout()
    timeout.measured(4.0)
    assert timeout.of(2.5) == 2.5 + ROUND_TRIPS * 4.0
    assert expire(timeout, 2.5) >= 2.5 + ROUND_TRIPS * 4.0
    timeout.measured(1e9)
    timeout.answered(9.0)
    assert timeout.of(0.0) == ROUND_TRIPS * MAX_RTT_S


def test_until_a_round_trip_is_measured_the_time_of_the_last_slow_answer_adds_to_every_wait() -> None:
    timeout = AdaptiveTimeout()
    timeout.answered(8.0)
    assert timeout.of(2.0) == 10.0
    timeout.answered(1e9)
    assert timeout.of(2.0) == 2.0 + MOST_PATIENT_S
    timeout.measured(0.1)
    assert timeout.of(2.0) == 2.0 + ROUND_TRIPS * 0.1
    timeout.answered(8.0)
    assert timeout.of(2.0) == 2.0 + ROUND_TRIPS * 0.1


def test_a_long_message_has_its_time_on_a_slow_uplink() -> None:
    timeout = AdaptiveTimeout()
    assert timeout.of_bytes(BYTES_PER_S) == 1.0
    expire(timeout, 2.5)
    assert timeout.of_bytes(SLOW_BYTES_PER_S) == 1.0
