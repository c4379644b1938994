"""Test the loop with heads as its student: they go to a folder that verifiers load from, and nothing is signed."""

from __future__ import annotations

from pathlib import Path

import pytest
from loop_fakes import TARGET, FakeStages, World

from cloud_verifier.distill.loop import DistillLoop
from cloud_verifier.distill.publisher import SERVED, serve_heads
from cloud_verifier.distill.run_folder import HEADS, RunFolder
from cloud_verifier.engine.server_draft.head_models import HeadsShape, load_heads, new_heads, save_heads
from outrider.core.errors import ModelRefused


class HeadsStages(FakeStages):
    """Write a file of heads at the export, another one in each run."""

    def run(self, stage: str, run: RunFolder) -> None:
        super().run(stage, run)
        if stage == "export":
            save_heads(run.path / HEADS, new_heads(HeadsShape(hidden=64), run.number), TARGET.weights_hash)


class HeadsWorld(World):
    """Hold a loop whose student is heads, and the file that verifiers load."""

    @property
    def served(self) -> Path:
        return self.folder / "artifacts" / SERVED

    def publisher(self) -> None:
        return None


@pytest.fixture
def world(tmp_path: Path) -> HeadsWorld:
    made = HeadsWorld(tmp_path, stages=HeadsStages())
    made.settings |= {"draft": tmp_path / "target"}
    return made


async def until_idle(loop: DistillLoop) -> DistillLoop:
    for _ in range(50):
        if await loop.step() > 0:
            return loop
    raise AssertionError("still busy")


async def test_heads_that_pass_the_gate_are_served_and_the_next_run_starts_from_them(world: HeadsWorld) -> None:
    world.traffic(1_000)
    loop = await until_idle(world.loop())
    assert world.stages.begun == ["dataset", "training", "export", "gate"]
    assert loop.run is None and (outcome := world.run().outcome) is not None and outcome.result == "stable"
    assert load_heads(world.served, TARGET.weights_hash)
    job = world.run().job
    assert job.base == job.incumbent == world.folder / "target"
    assert world.releases.published == [], "no coordinator is asked"

    first = world.served.resolve()
    world.traffic(1_000)
    await until_idle(loop)
    second = world.run(2).job
    assert second.base == second.incumbent == first != world.served.resolve()


def test_heads_of_another_target_are_refused(tmp_path: Path) -> None:
    save_heads(tmp_path / "others", new_heads(HeadsShape(hidden=64), 1), "sha256:other")
    with pytest.raises(ModelRefused, match="sha256:other"):
        serve_heads(tmp_path / "others", tmp_path / "served", TARGET.weights_hash)
