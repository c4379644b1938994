"""Test that the metrics follow the loop's state."""

from __future__ import annotations

import pytest
from loop_fakes import World, passage
from prometheus_client.exposition import generate_latest

from cloud_verifier.distill.errors import PermanentFailure
from cloud_verifier.distill.metrics import DistillCollector
from outrider.telemetry.prometheus import registry


@pytest.fixture
def world(tmp_path) -> World:
    world = World(tmp_path)
    world.log.passages.append(passage("one", 300_000, "sums", 500.0))
    return world


def samples(loop, world: World) -> dict[str, float]:
    text = generate_latest(registry(DistillCollector(loop, world.config))).decode()
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name.removeprefix("outrider_distill_"): float(value) for name, _, value in lines}


def where(found: dict[str, float]) -> list[str]:
    return [name for name, value in found.items() if name.startswith("stage{") and value]


async def test_the_stage_is_where_the_loop_is(world) -> None:
    loop = world.loop()
    assert where(samples(loop, world)) == ['stage{stage="watching"}']
    await loop.step()
    found = samples(loop, world)
    assert (where(found), found["run_number"]) == (['stage{stage="dataset"}'], 1)
    await loop.step()
    found = samples(loop, world)
    assert where(found) == ['stage{stage="training"}']
    assert 'stage_seconds_total{stage="dataset"}' in found


async def test_failures_and_results_are_counted(world) -> None:
    world.stages.fails["dataset"] = [PermanentFailure("dataset: no disk")]
    loop = world.loop()
    await loop.step()
    await loop.step()
    found = samples(loop, world)
    assert found["failures_total"] == 1
    assert found['runs_total{result="failed"}'] == 1
    assert found['last_result{result="failed"}'] == 1
    assert found['last_result{result="none"}'] == 0
    assert "last_run_age_seconds" in found
