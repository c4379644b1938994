"""Run 3,000 random schedules, or 50,000 at night: delays, losses, reconnects, failovers, zombies, ties and cancels."""

from __future__ import annotations

import os
import random
from collections import Counter

import pytest
from simulator import Scenario, World, run_schedule

from outrider.core.protocol.messages import SessionLimits

CHUNKS = 50 if os.environ.get("OUTRIDER_NIGHTLY") else 3
SCHEDULES_PER_CHUNK = 1_000
EVERY_CORNER = {
    "a Commit overlapped",
    "a Commit was ignored",
    "a gap made the device reattach",
    "a kept sequence was longer",
    "a late node became an alias",
    "a node died",
    "a smaller verifier shrank the tree",
    "a tie went the other way",
    "a zombie made a step",
    "an Append came during a step",
    "an Append was ignored",
    "an Append was repeated",
    "cancel",
    "nodes survived an attach",
    "the path ended by length",
    "the path ended in EOS",
    "the prompt was scored",
}


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_promise_holds_in_random_schedules(chunk: int) -> None:
    corners: Counter[str] = Counter()
    for seed in range(chunk * SCHEDULES_PER_CHUNK, (chunk + 1) * SCHEDULES_PER_CHUNK):
        corners += run_schedule(seed).happened
    assert set(corners) >= EVERY_CORNER, "the schedules no longer reach what they are there for"


def _steady(seed: int, **changes: object) -> World:
    """Return a long run without chaos, on a quick network."""
    scenario = Scenario(max_tokens=60, limits=(SessionLimits(12, 6, 16, 12),), rest=0.0, **changes)
    world = World(scenario, random.Random(seed))
    world.run()
    return world


def test_a_perfect_drafter_fills_every_step() -> None:
    worlds = [_steady(seed, match=1.0, chain=1.0, whole_batches=True, weights=(6, 3, 6, 6, 1)) for seed in range(30)]
    assert sum(len(world.delivered) for world in worlds) / sum(world.steps for world in worlds) > 3.5


def test_speculation_stays_alive_where_many_draft_tokens_are_rejected_late() -> None:
    worlds = [_steady(seed, match=0.7, patient=False, weights=(6, 3, 2, 2, 1)) for seed in range(100)]
    assert sum(world.happened["a node died"] for world in worlds) > 100
    assert sum(world.accepted for world in worlds) / sum(world.steps for world in worlds) > 0.5
