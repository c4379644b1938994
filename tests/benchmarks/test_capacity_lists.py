"""Test that all configurations of the capacity benchmark play the same texts, greedy and sampled ones in turn."""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import capacity
from benchmarks.capacity import CapacitySize, ServingSetup, ask, in_turn, measure
from benchmarks.support.draft_replay.client import SessionJob, SessionOutcome

GREEDY = (True, True, False, False, False, False, False)


class FakeSwarm:
    """Play every session in the same time, one token after another, and note what was asked for."""

    def __init__(self, seconds: float, wrong: int = 0) -> None:
        self.seconds = seconds
        self.wrong = wrong
        self.played: list[int] = []

    async def play(self, job: SessionJob) -> SessionOutcome:
        self.played.append(job.recording)
        begun = time.monotonic()
        await asyncio.sleep(self.seconds)
        at = [begun + self.seconds * (i + 1) / 10 for i in range(10)]
        return SessionOutcome(tokens=10, steps=5, finish="length", delivered_s=at, wrong=self.wrong)

    def cpu_s(self) -> float:
        return 0.0


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    async def timing(cluster: object) -> dict[str, float]:
        return {"draft": 1.0, "verify": 2.0}

    monkeypatch.setattr(capacity, "timing", timing)


def setup(name: str, seconds: float, wrong: int = 0) -> ServingSetup:
    swarm: Any = FakeSwarm(seconds, wrong)
    cluster: Any = SimpleNamespace()
    return ServingSetup(name, swarm, cluster, drafted=False)


def test_greedy_and_sampled_texts_come_in_turn_however_few_there_are_of_one_kind() -> None:
    begun = [*itertools.islice(in_turn(GREEDY, 0.0), 8)]
    assert begun == [0, 2, 1, 3, 0, 4, 1, 5]
    later = [*itertools.islice(in_turn(GREEDY, 0.5), 4)]
    assert later == [1, 4, 0, 5]
    assert [*itertools.islice(in_turn((False, False), 0.0), 3)] == [0, 1, 0]
    assert [*in_turn((), 0.0)] == []


@pytest.mark.parametrize(("level", "count"), [(1, 2), (4, 8), (4, 4)])
async def test_a_slow_and_a_fast_configuration_play_the_same_list(level: int, count: int) -> None:
    played = []
    for seconds in (0.02, 0.06):
        arm = setup("device", seconds)
        await ask(arm, level, in_turn(GREEDY, 0.0), GREEDY, count)
        played.append(arm.swarm.played)
        assert len(arm.swarm.played) >= level + count
    assert played[0][: level + count] == played[1][: level + count]


async def test_one_session_at_once_is_measured_greedy_and_sampled() -> None:
    found = await ask(setup("device", 0.05), 1, in_turn(GREEDY, 0.0), GREEDY, 2)
    assert not math.isnan(found.greedy_per_s) and not math.isnan(found.sampled_per_s)
    for speed in (found.tokens_per_s, found.greedy_per_s, found.sampled_per_s):
        assert 0 < speed < 240, "10 tokens in 50 ms or, on a busy machine, in more"
    assert found.tokens_per_step == 2.0


async def test_a_session_that_differs_ends_the_run() -> None:
    with pytest.raises(RuntimeError, match="not as recorded"):
        await ask(setup("device", 0.01, wrong=1), 1, in_turn(GREEDY, 0.0), GREEDY, 2)


async def test_every_list_is_one_of_its_own_for_all_configurations() -> None:
    size = CapacitySize(rounds=2, prompts=7, depths=(), colocated=(), both=2, levels=(1,), each=2)
    arms = [setup("autoregression", 0.01), setup("device", 0.03)]
    await measure(arms, GREEDY, size)
    begun = len(GREEDY)  # each is sent once, for the prefix cache
    slow, fast = (arm.swarm.played[begun:] for arm in arms)
    assert slow[:3] == fast[:3] == [0, 2, 1]
    assert slow[-3:] == fast[-3:], "the second round's"
    assert slow[:3] != slow[-3:]
