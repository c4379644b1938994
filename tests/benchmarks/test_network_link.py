"""Test what a link does to chunks, without a socket: order, delay, rate, jitter, room, scripts and pauses."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.support.network_link import (
    MAX_CHUNK_BYTES,
    Link,
    LinkClock,
    LinkDirection,
    LinkEvent,
    Stall,
    check_script,
)
from outrider.core.errors import BadRequest

EPSILON_S = 1e-6

rates = st.one_of(st.just(math.inf), st.floats(1e3, 1e9))
links = st.builds(
    Link,
    rtt_ms=st.floats(0, 1000),
    jitter_ms=st.floats(0, 200),
    up_bps=rates,
    down_bps=rates,
    queue_bytes=st.integers(MAX_CHUNK_BYTES, 1 << 18),
)
chunks = st.lists(st.tuples(st.floats(0, 0.2), st.integers(1, MAX_CHUNK_BYTES)), min_size=1, max_size=25)
"""(seconds since the chunk before, bytes)"""
ways = st.booleans()


def arrivals(chunks):
    """Return the arrival time and the size in bytes of each chunk."""
    return list(zip(itertools.accumulate(gap for gap, _ in chunks), (size for _, size in chunks), strict=True))


@given(chunks, st.data(), ways)
def test_nothing_overtakes_or_comes_early_however_the_link_changes(chunks, data, up):
    lane, leaves = LinkDirection(up=up), -math.inf
    for arrived, size in arrivals(chunks):
        link, before = data.draw(links), leaves
        leaves = lane.leaves(link, arrived, size, after_s=before)
        assert leaves >= before
        assert leaves >= arrived + link.rtt_ms / 2000.0 + 8.0 * size / link.bps(up=up) - EPSILON_S


@given(chunks, links, ways)
def test_over_every_window_a_lane_takes_its_bandwidth_and_one_chunk_at_most(chunks, link, up):
    lane, left = LinkDirection(up=up), {0: -math.inf, 1: -math.inf}
    leaves = []
    for index, (arrived, size) in enumerate(arrivals(chunks)):  # two connections by turns
        left[index % 2] = lane.leaves(link, arrived, size, after_s=left[index % 2])
        leaves.append((left[index % 2], size))
    leaves.sort()
    for first in range(len(leaves)):
        bits = 0.0
        for when, size in leaves[first + 1 :]:  # the first one is the chunk that may come on top
            bits += 8.0 * size
            assert bits / link.bps(up=up) <= when - leaves[first][0] + EPSILON_S


@given(chunks, links)
def test_jitter_adds_from_nothing_to_its_bound(chunks, link):
    link = Link(rtt_ms=link.rtt_ms, jitter_ms=link.jitter_ms)
    lane, leaves = LinkDirection(up=True), -math.inf
    for arrived, size in arrivals(chunks):
        leaves = lane.leaves(link, arrived, size, after_s=leaves)
        extra = leaves - arrived - link.rtt_ms / 2000.0
        assert -EPSILON_S <= extra <= link.jitter_ms / 1000.0 + EPSILON_S


@given(chunks, links, ways)
def test_a_sender_that_waits_for_room_never_has_more_in_the_queue_than_fits(chunks, link, up):
    lane, now = LinkDirection(up=up), 0.0
    for _, size in chunks:
        now = max(now, lane.room_at(link))
        waits = lane.leaves(link, now, size) - link.rtt_ms / 2000.0 - now
        jitter_s = link.jitter_ms / 1000.0
        assert waits <= jitter_s + 8.0 * (link.queue_bytes + size) / link.bps(up=up) + EPSILON_S


def test_a_busy_line_is_never_idle():
    lane, link = LinkDirection(up=True), Link(rtt_ms=100, up_bps=1e6)
    assert [lane.leaves(link, 5.0, 1250) for _ in range(3)] == pytest.approx([5.06, 5.07, 5.08])


def test_jitter_alone_leaves_the_queue_empty():
    lane, link = LinkDirection(up=True), Link(jitter_ms=1000)
    for _ in range(100):
        lane.leaves(link, 0.0, 1000)
    assert lane.room_at(link) <= 0.0


def test_the_same_seed_gives_the_same_jitter_and_the_directions_differ():
    def drawn(seed, up):
        lane = LinkDirection(up=up, seed=seed)
        return [lane.leaves(Link(jitter_ms=50), at, 1) for at in range(20)]

    assert drawn(1, True) == drawn(1, True)
    assert drawn(1, True) != drawn(2, True)
    assert drawn(1, True) != drawn(1, False)
    waits = [leaves - at for at, leaves in enumerate(drawn(1, True))]
    assert max(waits) - min(waits) > 0.01


def test_each_direction_has_its_own_rate_and_chunks_of_10_ms():
    link = Link(up_bps=4e6, down_bps=1e4)
    assert LinkDirection(up=True).leaves(link, 0.0, 5000) == pytest.approx(0.01)
    assert LinkDirection(up=False).leaves(link, 0.0, 5000) == pytest.approx(4.0)
    assert link.chunk_bytes(up=True) == 5000
    assert link.chunk_bytes(up=False) == 1200
    assert Link().chunk_bytes(up=True) == MAX_CHUNK_BYTES


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rtt_ms", -1.0),
        ("rtt_ms", 60_001.0),
        ("rtt_ms", math.nan),
        ("jitter_ms", math.inf),
        ("up_bps", 0.0),
        ("down_bps", math.nan),
        ("queue_bytes", 0),
        ("queue_bytes", 1 << 30),
    ],
)
def test_a_link_outside_its_bounds_is_refused_by_name(field, value):
    with pytest.raises(BadRequest, match=f"{field} is .*, must be") as caught:
        Link(**{field: value})
    assert caught.value.field == field


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.inf, math.nan])
def test_a_stall_has_a_length_and_an_end(seconds):
    with pytest.raises(BadRequest, match="seconds is"):
        Stall(seconds)


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        (((-1.0, Link()),), r"at_s of script\[0\] is -1.0, must be from 0"),
        (((2.0, Link()), (1.0, LinkEvent.RESET)), r"at_s of script\[1\] is 1.0, must be from 2 to"),
        (((math.nan, Link()),), r"at_s of script\[0\] is nan"),
        (((1.0, "reset"),), r"change of script\[0\] is 'reset', must be a Link, a Stall or a LinkEvent"),
        (((0.0, Link()),) * 10_001, "steps in script is 10001"),
    ],
)
def test_a_script_that_goes_back_or_says_something_else_is_refused(script, complaint):
    check_script(((0.0, Link()), (0.0, Stall(1.0)), (1.0, LinkEvent.LIFT)))
    with pytest.raises(BadRequest, match=complaint):
        check_script(script)


def test_the_links_time_stands_still_while_it_is_held():
    clock = [10.0]
    time = LinkClock(lambda: clock[0])

    def after(seconds):
        clock[0] += seconds
        return time.now()

    assert after(1.0) == 11.0
    time.hold()
    assert time.held
    assert after(5.0) == 11.0
    time.hold()
    assert after(5.0) == 11.0
    time.go()
    time.go()
    assert not time.held
    assert after(1.0) == 12.0
