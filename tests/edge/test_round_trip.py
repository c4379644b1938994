"""Test that answers are waited for as long as the network needs."""

from __future__ import annotations

from edge_agent.session.round_trip import BYTES_PER_S, MAX_RTT_S, ROUND_TRIPS, RoundTrip


def test_the_round_trip_and_what_is_sent_add_to_each_wait() -> None:
    round_trip = RoundTrip()
    assert round_trip.timeout(2.5) == 2.5
    round_trip.measured(0.5)
    assert round_trip.timeout(2.5, BYTES_PER_S) == 2.5 + ROUND_TRIPS * 0.5 + 1.0
    round_trip.measured(1e9)
    assert round_trip.timeout(0.0) == ROUND_TRIPS * MAX_RTT_S
