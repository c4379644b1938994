"""Test the streaming model against an independent simulation, against arithmetic, and against common sense."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from streaming_model import LinkTiming, replay

from coordinator.records import Window
from outrider.core.acceptance.history import HIT, MISS, SIBLING

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
    speed = replay(drawn(0.8, 0.5, 20_000), LinkTiming(rtt_ms / 1e3, 0.002, flat), Window(24, 24, nodes_per_level=2.0))
    assert speed.tokens_per_s * STEP_S == pytest.approx(over_streaming, rel=0.025)
    assert speed.tokens_per_step == pytest.approx(tokens_per_step, rel=0.025)


@given(history=st.binary(min_size=1, max_size=60).map(lambda data: bytes(byte % 3 for byte in data)))
def test_without_a_window_it_is_one_token_a_step(history: bytes) -> None:
    speed = replay(history, LinkTiming(0.05, 0.002, flat), Window(0, 0))
    assert (speed.steps, speed.nodes) == (len(history), 0.0)
    assert speed.seconds == pytest.approx(STEP_S * len(history))


def test_what_the_verifier_adds_by_itself_counts_at_every_distance_and_beside_every_window() -> None:
    """Two steps in three commit one token more, however far the device is, unless its own nodes lead further."""
    far, near = LinkTiming(2.0, 0.002, flat), LinkTiming(0.0, 1e-6, flat)
    history = bytes([MISS] * 600)
    assert replay(history, far, Window(0, 0), 2 / 3).tokens_per_step == pytest.approx(5 / 3, rel=0.01)
    assert replay(history, near, Window(4, 12), 2 / 3).tokens_per_step == pytest.approx(5 / 3, rel=0.01)
    right = bytes([HIT] * 600)
    assert replay(right, near, Window(4, 12), 2 / 3).tokens_per_step == pytest.approx(5.0, rel=0.02)
    assert replay(right, far, Window(4, 12), 2 / 3).tokens_per_step == pytest.approx(5 / 3, rel=0.05)


def test_a_draft_wait_catches_a_first_proposal_that_is_about_to_arrive() -> None:
    history, way = drawn(0.8, 0.5, 5000), LinkTiming(0.002, 0.002, flat)
    waiting = replay(history, way, Window(12, 16, draft_wait_ms=8.0))
    assert waiting.tokens_per_step > 1.05 * replay(history, way, Window(12, 16)).tokens_per_step


@given(
    hit=st.floats(0.0, 1.0),
    rtt_s=st.floats(0.0, 0.5),
    draft_s=st.floats(1e-5, 0.1),
    depth=st.integers(1, 32),
    k=st.integers(1, 16),
    seed=st.integers(0, 99),
)
def test_it_stays_within_what_is_possible(
    hit: float, rtt_s: float, draft_s: float, depth: int, k: int, seed: int
) -> None:
    history = drawn(hit, 0.5, 120, seed)
    speed = replay(history, LinkTiming(rtt_s, draft_s, flat), Window(k, depth))
    assert speed.tokens == 120
    assert 1.0 <= speed.tokens_per_step <= 1 + min(k, depth)
    assert speed.nodes <= speed.steps * min(k, depth)
    assert speed.seconds >= STEP_S * speed.steps * (1.0 - 1e-9)
    # Every token is either a step's own or an accepted proposal.
    assert speed.steps >= sum(outcome == MISS for outcome in history)
