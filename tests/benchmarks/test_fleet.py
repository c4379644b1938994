"""The simulated fleet: the same life for all, on text that the controller has not seen."""

from __future__ import annotations

import random

import pytest

from benchmarks import fleet
from benchmarks.fleet import FLEETS, STRETCH, Fleet, Scale, Text
from outrider.core.verdicts import HIT

SMALL = Scale(devices=24, verifiers=2, seconds=14)


@pytest.fixture(scope="module")
def lived() -> tuple[Fleet, fleet.Tally]:
    world = Fleet(SMALL, seed=5)
    return world, fleet.simulate(world)


def test_nobody_is_slower_under_the_controller_than_if_all_streamed(lived: tuple[Fleet, fleet.Tally]) -> None:
    ratios = lived[1].over_streaming["controller"]
    assert len(ratios) > SMALL.devices
    assert sum(ratio < 0.97 for ratio in ratios) < 0.05 * len(ratios)


def test_where_nodes_are_cheap_the_controller_gains_and_fairness_costs_nothing(
    lived: tuple[Fleet, fleet.Tally],
) -> None:
    tokens = lived[1].tokens
    assert tokens["controller"] > 1.15 * tokens["streaming"]
    assert tokens["controller"] > 0.97 * tokens["goodput alone"]
    assert tokens["controller"] > 0.97 * tokens["static"]


def test_in_a_crowd_nobody_pays_for_others() -> None:
    tally = fleet.simulate(Fleet(Scale(devices=150, verifiers=1, seconds=11), seed=2))
    ratios = tally.over_streaming
    assert sum(ratio < 0.97 for ratio in ratios["controller"]) < 0.05 * len(ratios["controller"])
    assert sum(ratio < 0.97 for ratio in ratios["static"]) > 0.2 * len(ratios["static"])


def test_the_report_has_a_figure_for_every_fleet(lived: tuple[Fleet, fleet.Tally]) -> None:
    found = fleet.report(*lived)
    assert set(found["goodput_over_streaming"]) == set(found["p1"]) == set(FLEETS)
    assert found["decide_s_p50"] > 0


def test_as_many_sessions_live_as_there_are_devices(lived: tuple[Fleet, fleet.Tally]) -> None:
    world, _ = lived
    assert len(list(world.sessions)) == SMALL.devices
    assert world.ended


def test_text_comes_in_stretches_and_is_not_used_up_by_a_look_ahead() -> None:
    text = Text("code", random.Random(3))
    ahead = text.ahead(4000)
    assert text.take(4000) == ahead
    windows = [sum(v == HIT for v in ahead[i : i + STRETCH]) / STRETCH for i in range(0, 4000, STRETCH)]
    mean = sum(windows) / len(windows)
    variance = sum((share - mean) ** 2 for share in windows) / len(windows)
    assert variance > 1.3 * mean * (1 - mean) / STRETCH  # more than independent matches would have
