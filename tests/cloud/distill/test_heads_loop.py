"""Test the loop with heads as its student: they go to a folder, verifiers try them, and nothing is signed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from loop_fakes import TARGET, FakeStages, World

from cloud_verifier.distill.loop import DistillLoop
from cloud_verifier.distill.publishing.heads import HeadsPublisher
from cloud_verifier.distill.run_folder import HEADS, PLAN, Job
from cloud_verifier.engine.server_draft.head_models import HeadsShape, new_heads, save_heads
from cloud_verifier.engine.server_draft.heads_folder import HeadsFolder


class HeadsStages(FakeStages):
    """Write a file of heads at the export, another one in each run."""

    async def run(self, stage: str, folder: Path) -> None:
        await super().run(stage, folder)
        if stage == "export":
            save_heads(folder / HEADS, new_heads(HeadsShape(hidden=64), int(folder.name)), TARGET.weights_hash)


class HeadsWorld(World):
    """Hold a loop whose student is heads, and the folder that verifiers read."""

    @property
    def heads(self) -> HeadsFolder:
        return HeadsFolder(self.folder / "artifacts", TARGET.weights_hash)

    def publisher(self) -> Any:
        return HeadsPublisher(self.folder / "artifacts", TARGET)


@pytest.fixture
def world(tmp_path: Path) -> HeadsWorld:
    made = HeadsWorld(tmp_path, stages=HeadsStages())
    made.settings |= {"student": "heads", "draft": tmp_path / "target"}
    return made


async def until_idle(loop: DistillLoop) -> DistillLoop:
    for _ in range(50):
        if await loop.step() > 0:
            return loop
    raise AssertionError(f"still busy: {loop.state}")


async def test_heads_become_the_canary_of_the_folder_and_stable_when_a_verifier_says_so(world: HeadsWorld) -> None:
    world.traffic(1_000)
    loop = await until_idle(world.loop())
    assert world.stages.begun == ["dataset", "training", "export", "gate"]
    (release,) = world.heads.releases()
    assert release.state == "canary" and loop.state.run is not None and loop.state.run.stage == "canary"
    assert world.heads.path(release.digest).is_file()
    job = Job.read(world.folder / "state" / "runs" / "1")
    assert (job.student, job.base, job.incumbent) == ("heads", world.folder / "target", world.folder / "target")
    assert json.loads((world.folder / "state" / "runs" / "1" / PLAN).read_text())["heads"] == {}
    world.heads.decide(release.digest, "stable", "better")
    await until_idle(loop)
    assert (loop.state.run, loop.state.history[-1].result) == (None, "stable")
    assert world.releases.published == []

    world.traffic(1_000)
    await until_idle(loop)
    second = Job.read(world.folder / "state" / "runs" / "2")
    assert second.base == second.incumbent == world.heads.path(release.digest)


async def test_heads_that_a_verifier_rolls_back_end_their_run(world: HeadsWorld) -> None:
    world.traffic(1_000)
    loop = await until_idle(world.loop())
    world.heads.decide(world.heads.releases()[0].digest, "rolled_back", "0.31 tokens a step proposed right")
    await until_idle(loop)
    outcome = loop.state.history[-1]
    assert (outcome.result, outcome.reason) == ("rolled_back", "0.31 tokens a step proposed right")


async def test_heads_that_newer_ones_replace_are_called_stable_only_if_they_were(world: HeadsWorld) -> None:
    for number, found_good in enumerate((False, True), start=1):
        world.traffic(1_000)
        loop = await until_idle(world.loop())
        if found_good:
            world.heads.decide(world.heads.releases()[0].digest, "stable", "better")
        by_hand = world.folder / f"by-hand-{number}"
        save_heads(by_hand, new_heads(HeadsShape(hidden=64), 90 + number), TARGET.weights_hash)
        world.heads.decide(world.heads.add(by_hand).digest, "stable", "better still")
        await until_idle(loop)
        assert loop.state.history[-1].result == ("stable" if found_good else "rolled_back")
    assert [one.state for one in world.heads.releases()] == ["stable", "superseded", "superseded", "rolled_back"]


async def test_heads_that_the_gate_refuses_reach_no_folder(world: HeadsWorld) -> None:
    world.stages.passes = False
    world.traffic(1_000)
    loop = await until_idle(world.loop())
    assert loop.state.history[-1].result == "refused" and world.heads.releases() == ()


async def test_a_restarted_loop_publishes_no_second_time(world: HeadsWorld) -> None:
    world.traffic(1_000)
    await until_idle(world.loop())
    await until_idle(world.loop())
    assert len(world.heads.releases()) == 1
