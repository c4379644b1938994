"""Test when a stream pings, what the answers show, and how long a silent device is waited for."""

from __future__ import annotations

import pytest

from cloud_verifier.front.heartbeat import Heartbeat
from outrider.core.errors import Unavailable


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def beating(clock: Clock) -> Heartbeat:
    return Heartbeat(0.5, 20.0, clock)


def round_trip(heartbeat: Heartbeat, clock: Clock, seconds: float) -> float | None:
    nonce = heartbeat.ping().nonce
    clock.now += seconds
    return heartbeat.pong(nonce)


def test_the_lesser_of_the_last_two_round_trips_is_the_paths():
    clock = Clock()
    heartbeat = beating(clock)
    assert heartbeat.rtt_ms == 0.0
    seen = []
    for late_s in (0.1, 0.3, 0.3, 0.2):
        assert round_trip(heartbeat, clock, late_s) == pytest.approx(1000 * late_s)
        seen.append(heartbeat.rtt_ms)
    assert seen == pytest.approx([100.0, 100.0, 300.0, 200.0])
    assert heartbeat.ping().rtt_ms == heartbeat.rtt_ms


def test_an_answer_counts_once_and_one_to_no_ping_is_no_sign_of_life():
    clock = Clock()
    heartbeat = beating(clock)
    nonce = heartbeat.ping().nonce
    assert heartbeat.pong(nonce) is not None
    clock.now += 15.0
    assert heartbeat.pong(nonce) is None
    assert heartbeat.pong(12345) is None
    clock.now += 6.0
    with pytest.raises(Unavailable, match=r"silent for 20\.0 s; attach again"):
        heartbeat.ping()


async def test_a_session_that_was_given_up_is_not_brought_back():
    heartbeat = Heartbeat(0.01, 0.02)
    await heartbeat.silence()
    heartbeat.sign_of_life()
    with pytest.raises(Unavailable):
        heartbeat.ping()
