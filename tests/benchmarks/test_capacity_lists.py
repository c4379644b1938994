"""Test which texts the configurations of the capacity benchmark play, and how they are compared and drawn."""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from benchmarks import capacity
from benchmarks.capacity import CapacitySize, ServingSetup, ask, draw_plot, in_turn, measure
from benchmarks.capacity_findings import LoadWindow, MeasuredCell, report
from benchmarks.support import harness
from benchmarks.support.draft_replay.client import SessionJob, SessionOutcome

GREEDY = (True, True, False, False, False, False, False)


class FakeCluster:
    """Note whether coordinator and verifier run. Once they go on the verifier reports at the fourth look."""

    address: Any = None

    def __init__(self) -> None:
        self.stopped: set[str] = set()
        self.coordinator, verifier = self._child("coordinator"), self._child("verifier")
        self.verifiers = [verifier]
        self.looks = 0

    @property
    def stands_still(self) -> bool:
        return self.stopped == {"coordinator", "verifier"}

    def _child(self, name: str) -> SimpleNamespace:
        def signal_group(number: int) -> None:
            (self.stopped.add if number == signal.SIGSTOP else self.stopped.discard)(name)
            self.looks = 0

        return SimpleNamespace(signal_group=signal_group, running=True)

    def status(self) -> SimpleNamespace:
        assert not self.stopped
        self.looks += 1
        expired, old = [], [SimpleNamespace(lease_s=0.4, telemetry=SimpleNamespace(timing_ms={"draft": 1.0}))]
        registered = [SimpleNamespace(lease_s=5.0, telemetry=SimpleNamespace(timing_ms={}))]
        reported = [SimpleNamespace(lease_s=5.0, telemetry=SimpleNamespace(timing_ms={"draft": 1.0}))]
        return SimpleNamespace(verifiers=[old, expired, registered, reported][min(self.looks, 4) - 1])


class FakeSwarm:
    """Play every session in the same time, one token after another, and note what was asked for."""

    def __init__(self, cluster: FakeCluster, seconds: float, wrong: int = 0) -> None:
        self.cluster = cluster
        self.seconds = seconds
        self.wrong = wrong
        self.played: list[int] = []

    async def play(self, job: SessionJob) -> SessionOutcome:
        assert not self.cluster.stopped
        assert self.cluster.looks in (0, 4), "it is registered"
        self.played.append(job.recording)
        begun = time.monotonic()
        await asyncio.sleep(self.seconds)
        at = [begun + self.seconds * (i + 1) / 10 for i in range(10)]
        return SessionOutcome(tokens=10, steps=5, finish="length", delivered_s=at, wrong=self.wrong)


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    async def timing(cluster: object) -> dict[str, float]:
        return {"draft": 1.0, "verify": 2.0}

    async def status(address: FakeCluster) -> Any:
        return address.status()

    monkeypatch.setattr(capacity, "timing", timing)
    monkeypatch.setattr(capacity, "LOOK_S", 0.0)
    monkeypatch.setattr(harness, "status", status)


def setup(name: str, seconds: float, wrong: int = 0) -> ServingSetup:
    cluster: Any = FakeCluster()
    cluster.address = cluster  # by which its status is asked for
    swarm: Any = FakeSwarm(cluster, seconds, wrong)
    return ServingSetup(name, swarm, cluster, drafted=False, clients_core=min(os.sched_getaffinity(0)))


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
    size = CapacitySize(rounds=2, prompts=7, depths=(), colocated=(), both=2, levels=(1,), least=2)
    arms = [setup("autoregression", 0.01), setup("device", 0.03)]
    await measure(arms, GREEDY, size)
    begun = len(GREEDY)  # each is sent once, for the prefix cache
    slow, fast = (arm.swarm.played[begun:] for arm in arms)
    assert slow[:3] == fast[:3] == [0, 2, 1]
    assert slow[-3:] == fast[-3:], "the second round's"
    assert slow[:3] != slow[-3:]


async def test_the_processes_of_all_others_stand_still_while_one_configuration_is_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arms = [setup("autoregression", 0.01), setup("device", 0.01)]
    still: list[tuple[bool, ...]] = []

    async def watched(arm: ServingSetup, *given: Any) -> LoadWindow:
        still.append(tuple(cast(FakeCluster, one.cluster).stands_still for one in arms))
        return await ask(arm, *given)

    monkeypatch.setattr(capacity, "ask", watched)
    await measure(arms, GREEDY, CapacitySize(1, 7, depths=(), colocated=(), both=2, levels=(1,), least=2))
    assert still == [(True, False), (False, True)]
    assert not any(cast(FakeCluster, arm.cluster).stopped for arm in arms)


async def test_a_verifier_that_has_ended_is_not_waited_for() -> None:
    arm, cluster = setup("device", 0.01), FakeCluster()
    cluster.verifiers[0].running = False
    arm = replace(arm, cluster=cast(Any, cluster))
    with pytest.raises(RuntimeError, match="a verifier has ended"):
        await measure([arm], GREEDY, CapacitySize(1, 7, depths=(), colocated=(), both=2, levels=(1,), least=2))
    assert not cluster.stopped, "all go on where a run fails"


SPEEDS = {
    "autoregression": (50.0, 400.0),
    "device": (90.0, 380.0),
    "device, controlled": (100.0, 410.0),
    "server draft 2": (80.0, 300.0),
    "co-located 2": (60.0, 320.0),
    "co-located 4": (75.0, 200.0),
    "both": (120.0, 360.0),
    "both, controlled": (110.0, 400.0),
}
"""Configuration -> tokens per second of one session and of 32."""


def cells() -> capacity.Cells:
    parts_ms = {"draft": 1.0, "verify": 4.0}
    return {
        (name, level): MeasuredCell([LoadWindow(speed, speed, speed, 1.5, 0.1, parts_ms)] * 3)
        for name, each in SPEEDS.items()
        for level, speed in zip((1, 32), each, strict=True)
    }


def test_devices_are_held_against_the_better_of_server_side_drafting_and_streaming() -> None:
    found = report("a draft", cells(), (1, 32))
    assert found["vs_without_devices"] == {"1": 1.125, "32": 0.95}, "over a server's draft, then over streaming"
    assert found["controlled_vs_without_devices"] == {"1": 1.25, "32": 1.025}
    assert found["both_vs_without_devices"] == {"1": 1.5, "32": 0.9}
    assert found["both_controlled_vs_without_devices"] == {"1": 1.375, "32": 1.0}
    assert found["vs_server_draft"] == {"1": 1.125, "32": 1.188}
    assert found["both_over_best"] == {"1": 1.2, "32": 0.878}, "over the coordinator's windows"
    assert found["server_draft_bound"] == {"1": 1.125, "32": 1.125}
    assert found["tokens_per_s"]["co-located 4"] == {"1": 75.0, "32": 200.0}


def test_there_is_a_plot_of_every_configuration(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = draw_plot(report("a draft", cells(), (1, 32)), "a draft", tmp_path / "new", "heavy_draft")
    assert drawn == tmp_path / "new" / "capacity_heavy_draft.png"
    assert drawn.read_bytes().startswith(b"\x89PNG")
