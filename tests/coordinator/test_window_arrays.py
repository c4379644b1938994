"""Test that many histories replayed as arrays are as fast as each of them replayed by a model of the protocol."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streaming_model import LinkTiming, Speed, replay

from coordinator import window
from coordinator.window import RECENT
from outrider.core.acceptance.history import HIT, MISS, SIBLING
from outrider.wire.v1 import coordinator_pb2 as pb

TIMES = st.one_of(st.just(0.0), st.integers(-40, 24).map(lambda n: 2.0 ** (n / 8)))
"""Times in steps; products of eighths of an octave are what the controller asks for."""
RUNS = st.lists(st.tuples(st.sampled_from((MISS, SIBLING, HIT)), st.integers(1, 40)), min_size=1, max_size=30)
HISTORIES = st.one_of(
    st.binary(min_size=1, max_size=RECENT).map(lambda drawn: bytes(byte % 3 for byte in drawn)),
    RUNS.map(lambda runs: b"".join(bytes([outcome]) * count for outcome, count in runs)[:RECENT]),
)


def replayed(
    history: bytes, rtt: float, draft: float, k: int, depth: int, wait: float = 0.0, gain: float = 0.0
) -> Speed:
    """Replay a history with times in steps."""
    return replay(
        history, LinkTiming(rtt, draft, lambda nodes: 1.0), pb.Window(k=k, depth=depth, draft_wait_ms=1e3 * wait), gain
    )


@settings(max_examples=150)
@given(
    histories=st.lists(HISTORIES, min_size=1, max_size=4),
    times=st.tuples(TIMES, TIMES),
    windows=st.lists(st.tuples(st.integers(0, 16), st.integers(0, 32)), min_size=1, max_size=4),
    wait=st.sampled_from((0.0, 0.1, 0.4, 1.0)),
    gain=st.sampled_from((0.0, 0.3, 0.7, 1.5, 2.0)),
)
def test_all_histories_are_replayed_at_once_as_each_is_by_itself(
    histories: list[bytes], times: tuple[float, float], windows: list[tuple[int, int]], wait: float, gain: float
) -> None:
    k, depth = np.array(windows).T
    lengths, steps, levels = window.replay(histories, *times, k, depth, wait, gain)
    for i, history in enumerate(histories):
        for j, (one_k, one_depth) in enumerate(windows):
            speed = replayed(history, *times, one_k, one_depth, wait, gain)
            assert (steps[i, j], levels[i, j]) == (speed.steps, speed.nodes)
            assert lengths[i, j] == pytest.approx(speed.seconds, abs=1e-9)


STEP_S = 0.030


def flat(nodes: int) -> float:
    return STEP_S + 0.00005 * nodes


def drawn(hit: float, caught: float, count: int, seed: int = 1) -> bytes:
    """Draw independent outcomes: `caught` of the first proposal's misses are a sibling's hits."""
    rng = random.Random(seed)
    return bytes(HIT if rng.random() < hit else SIBLING if rng.random() < caught else MISS for _ in range(count))


@pytest.mark.parametrize(
    ("rtt_ms", "over_streaming", "tokens_per_step"),
    # An event simulation of the whole protocol: matches of 0.8, siblings that catch half of the misses, 2 ms a level.
    [(1, 2.88, 2.94), (20, 2.51, 2.54), (50, 1.92, 1.93), (100, 1.50, 1.50), (200, 1.17, 1.17)],
)
def test_it_agrees_with_an_event_simulation_of_the_protocol(
    rtt_ms: int, over_streaming: float, tokens_per_step: float
) -> None:
    speed = replay(
        drawn(0.8, 0.5, 20_000), LinkTiming(rtt_ms / 1e3, 0.002, flat), pb.Window(k=24, depth=24, nodes_per_level=2.0)
    )
    assert speed.tokens_per_s * STEP_S == pytest.approx(over_streaming, rel=0.025)
    assert speed.tokens_per_step == pytest.approx(tokens_per_step, rel=0.025)
