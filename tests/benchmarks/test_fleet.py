"""Test the simulated fleet: every policy meets the same events, on text that the controller has not seen."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace

import pytest

from benchmarks import fleet
from benchmarks.fleet import BOUNDS, DECIDED_EVERY, FLEETS, LOADS, UCB, FleetTally, learned_windows
from benchmarks.support.fleet_simulation.world import PASSAGE, STREAMING, FleetSize, SimulatedFleet, SimulatedText
from coordinator.records import WindowDecision
from coordinator.window.controller import TOLERANCE, VerifierView, decide
from outrider.core.acceptance.history import HIT

SMALL = FleetSize(devices=24, verifiers=2, regions=1)


@pytest.fixture(scope="module")
def lived() -> tuple[SimulatedFleet, FleetTally]:
    world = SimulatedFleet(SMALL, seed=6)
    return world, fleet.simulate(world)


def test_nobody_is_much_slower_under_the_controller_than_if_all_streamed(
    lived: tuple[SimulatedFleet, FleetTally],
) -> None:
    ratios = lived[1].over_streaming
    assert len(ratios) == SMALL.devices * (SMALL.seconds - DECIDED_EVERY)
    assert sum(ratio < 0.97 for ratio in ratios) < 0.1 * len(ratios)


def test_where_nodes_are_cheap_the_controller_gains_and_comes_near_the_optimum(
    lived: tuple[SimulatedFleet, FleetTally],
) -> None:
    tally = lived[1]
    assert tally.goodput("controller") > 1.15
    assert 0.85 < tally.vs_optimum() <= 1.03  # noise may break the promise that binds the optimum
    assert tally.vs_optimum("goodput alone") <= 1.001  # no promise: nothing brings more than the optimum


def test_the_optimum_keeps_the_promise_and_the_other_one_brings_no_less(
    lived: tuple[SimulatedFleet, FleetTally],
) -> None:
    tally = lived[1]
    assert tally.shares("optimum")[0] >= 1.0 - TOLERANCE - 1e-4
    assert tally.goodput("optimum alone") >= tally.goodput("optimum") - 1e-4


def test_ucb_specstop_gains_less_than_the_optimum_and_makes_no_promise(
    lived: tuple[SimulatedFleet, FleetTally],
) -> None:
    tally = lived[1]
    assert 1.0 < tally.goodput(UCB) <= tally.goodput("optimum alone") * 1.001
    crowd = fleet.simulate(SimulatedFleet(FleetSize(devices=150, verifiers=1, regions=1), seed=4))
    assert crowd.promise_broken(UCB) > 0.1 > crowd.promise_broken("controller")


def test_a_bandit_has_learned_for_as_long_as_its_session_is_old_and_leaves_the_fleet_as_it_was() -> None:
    world = SimulatedFleet(SMALL, seed=6)
    verifier = world.verifiers[0]
    for age_s, session in enumerate(verifier.sessions):
        session.lived_s = min(age_s, 9)
    before = [(session.seen, session.text.ahead(300), session.lived_s) for session in verifier.sessions]
    windows = learned_windows(verifier)
    assert [window.k for window in windows] == [1 + min(age_s, 9) for age_s in range(len(windows))]
    assert before == [(session.seen, session.text.ahead(300), session.lived_s) for session in verifier.sessions]
    assert windows == learned_windows(verifier)


def test_worse_windows_are_further_from_the_optimum(
    monkeypatch: pytest.MonkeyPatch, lived: tuple[SimulatedFleet, FleetTally]
) -> None:
    def streaming(view: VerifierView, tolerance: float = 0.02) -> Mapping[str, WindowDecision]:
        return {name: replace(one, window=STREAMING) for name, one in decide(view, tolerance).items()}

    monkeypatch.setattr(fleet, "decide", streaming)
    tally = fleet.simulate(SimulatedFleet(SMALL, seed=6))
    assert tally.goodput("controller") == pytest.approx(1.0, rel=1e-3)
    assert tally.vs_optimum() < lived[1].vs_optimum() - 0.1


def test_in_a_crowd_nobody_pays_for_others() -> None:
    tally = fleet.simulate(SimulatedFleet(FleetSize(devices=150, verifiers=1, regions=1), seed=4))
    controlled, static = tally.shares("controller"), tally.shares("static")
    assert sum(ratio < 0.97 for ratio in controlled) < 0.05 * len(controlled)
    assert sum(ratio < 0.97 for ratio in static) > 0.2 * len(static)


def test_the_report_has_a_figure_for_every_fleet(lived: tuple[SimulatedFleet, FleetTally]) -> None:
    found = fleet.report("small", lived[1])
    names = {*FLEETS, *BOUNDS.values()}
    assert set(found["goodput_over_streaming"]) == set(found["slowest_over_streaming"]) == names
    assert found["decide_s_p50"] > 0


def test_the_last_line_says_the_worse_of_the_loads() -> None:
    found = fleet.run(FleetSize(devices=120, verifiers=4, regions=2), workers=1)
    assert found["devices"] == 120
    assert found["seconds"] > 0.0
    assert set(found["vs_optimum_by_load"]) == set(LOADS)
    assert found["vs_optimum"] == min(found["vs_optimum_by_load"].values())
    assert set(found["slowest_over_streaming"]) == set(found["promise_broken"]) == set(fleet.COMPARED)
    assert tuple(found) == fleet.KEYS


def test_one_device_has_one_session_at_most_and_as_many_are_open_as_were() -> None:
    world = SimulatedFleet(SMALL, open_share=0.5, seed=6)
    for now in range(60):
        world.turn(float(now))
    devices = [id(session.device) for session in world.sessions]
    assert len(devices) == len(set(devices)) == SMALL.devices / 2
    assert len(world.ended) > SMALL.devices / 2


def test_every_verifier_of_all_regions_has_its_number() -> None:
    numbers = [
        v.number
        for seed in range(3)
        for v in SimulatedFleet(FleetSize(devices=8, verifiers=4, regions=1), 1.0, seed).verifiers
    ]
    assert numbers == list(range(12))


def test_text_comes_in_spans_and_is_not_used_up_by_a_look_ahead() -> None:
    text = SimulatedText("code", random.Random(3))
    ahead = text.ahead(4000)
    assert text.take(4000) == ahead
    windows = [sum(v == HIT for v in ahead[i : i + PASSAGE]) / PASSAGE for i in range(0, 4000, PASSAGE)]
    mean = sum(windows) / len(windows)
    variance = sum((share - mean) ** 2 for share in windows) / len(windows)
    assert variance > 1.3 * mean * (1 - mean) / PASSAGE  # more than independent matches would have
