"""The token bucket, with a clock of our own."""

from __future__ import annotations

from cloud_verifier.front.rate_limiter import NODES_PER_MESSAGE, Pace


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_burst_goes_through_and_what_follows_goes_at_the_rate():
    clock = Clock()
    pace = Pace(10.0, 3, clock)
    assert [pace.delay_s() for _ in range(3)] == [0.0] * 3
    for _ in range(5):
        delay = pace.delay_s()
        assert abs(delay - 0.1) < 1e-9
        clock.now += delay


def test_who_talks_slower_than_the_rate_never_waits():
    clock = Clock()
    pace = Pace(10.0, 1, clock)
    for _ in range(20):
        assert pace.delay_s() == 0.0
        clock.now += 0.11


def test_silence_saves_up_no_more_than_a_burst():
    clock = Clock()
    pace = Pace(10.0, 3, clock)
    clock.now += 3600.0
    assert [pace.delay_s() > 0.0 for _ in range(4)] == [False, False, False, True]


def test_nodes_are_charged_beside_the_message_that_brings_them():
    clock = Clock()
    pace = Pace(10.0, 5, clock)
    assert pace.delay_s(4 * NODES_PER_MESSAGE) == 0.0  # five of five
    assert abs(pace.delay_s(NODES_PER_MESSAGE // 2) - 0.15) < 1e-9
