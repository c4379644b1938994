"""Test that sessions go to the region that is predicted to be the fastest for their device, and how far they go."""

from __future__ import annotations

import collections
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator import placement
from coordinator.config import CoordinatorConfig
from coordinator.placement import Candidate
from coordinator.records import PlacementRequest, Prior, VerifierRegistration, VerifierStatus
from coordinator.window.streaming import LinkTiming, replay
from outrider.core.acceptance.history import HIT, MISS
from outrider.core.errors import Overloaded
from outrider.core.step_cost import StepCost
from outrider.core.telemetry import VerifierTelemetry
from outrider.wire.ticket import Target

CONFIG = CoordinatorConfig(spill_share=0.8, spill_ms=150.0)
COST = {1: 20.0, 8: 22.0, 64: 60.0}
GOOD = Prior(bytes([HIT] * 80 + [MISS] * 20))
NEAR, FAR, FARTHEST = "eu", "us", "asia"
TRIPS = {NEAR: 10.0, FAR: 100.0, FARTHEST: 250.0}


def verifier(name: str, region: str, live: int = 0, capacity: int = 8, **load: Any) -> VerifierStatus:
    target = Target("demo", "w", "t", "float32")
    registration = VerifierRegistration(name, "127.0.0.1:1", False, target, capacity, 1, region)
    measured = {"step_cost_ms": COST, "session_cost_ms": 0.2, **load}
    return VerifierStatus(registration, VerifierTelemetry(live_sessions=live, **measured), 5.0)


def ranked(fleet: list[VerifierStatus], config: CoordinatorConfig = CONFIG, **request: Any) -> list[Candidate]:
    wanted = PlacementRequest(**{"draft": "d", "round_trips": TRIPS, **request})
    return placement.candidates(targets(fleet), wanted, random.Random(1), config, GOOD, known(fleet))


def known(fleet: list[VerifierStatus]) -> dict[str, VerifierStatus]:
    return {one.registration.verifier_id: one for one in fleet}


def targets(fleet: list[VerifierStatus]) -> dict[str, Target]:
    return {name: one.registration.target for name, one in known(fleet).items()}


def ranks(found: list[Candidate]) -> dict[str, int]:
    return {one.region: one.rank for one in found}


# --- prediction


def test_distance_costs_a_drafting_device_speed_and_a_streaming_one_a_single_round_trip() -> None:
    near, far = (placement.answer_ms(rtt, 40.0, 0.0, GOOD) for rtt in (10.0, 200.0))
    assert far / near > 1.5
    near, far = (placement.answer_ms(rtt, 40.0, 0.0, None) for rtt in (10.0, 200.0))
    assert far - near == pytest.approx(190.0)


def test_the_prediction_is_the_replays_of_the_window_control() -> None:
    history = random.Random(7).choices([HIT, MISS], [0.8, 0.2], k=2_000)
    for rtt_ms in (0.0, 40.0, 100.0, 240.0):
        timing = LinkTiming(rtt_ms / 1e3, 0.005, lambda nodes: 0.04)
        replayed = replay(history, timing, placement.WINDOW).tokens_per_step
        assert placement.tokens_per_step(rtt_ms, 40.0, 0.0, GOOD) == pytest.approx(replayed, rel=0.12)


def test_the_page_shows_what_is_predicted() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "operations.md").read_text()
    near, *others, last = (f"{placement.tokens_per_step(ms, 40.0, 0.0, GOOD):.2f}" for ms in (10.0, 60.0, 110.0, 210.0))
    assert f"predicted {', '.join((near, *others))} and {last} tokens" in page


def test_where_nodes_must_be_better_a_session_speculates_less() -> None:
    by_price = [placement.tokens_per_step(10.0, 40.0, price, GOOD) for price in (0.0, 0.5, 0.7, 0.9, 1.0)]
    assert by_price == sorted(by_price, reverse=True)
    assert by_price[0] > 1.8
    assert by_price[-2:] == [1.0, 1.0]


@pytest.mark.parametrize("sessions", [1, 4, 8, 40, 64, 100])
def test_a_step_is_as_long_as_the_verifiers_cost_model_says(sessions: int) -> None:
    load = verifier("v", NEAR, timing_ms={"between": 1.5}).telemetry
    cost = StepCost({rows: ms / 1e3 for rows, ms in COST.items()}, 0.2e-3)
    expected_ms = 1.5 + 1e3 * cost.seconds(sessions, sessions)
    assert placement.step_ms(load, sessions) == pytest.approx(expected_ms, rel=0.01)
    slow = verifier("v", NEAR, live=4, step_ms=2 * placement.step_ms(load, 4), timing_ms={"between": 1.5}).telemetry
    assert placement.step_ms(slow, sessions) == pytest.approx(2 * expected_ms, rel=0.01)


# --- ranks


def test_the_nearest_region_is_the_best_and_the_others_follow_as_far_as_the_cap() -> None:
    found = ranked([verifier("a", NEAR), verifier("b", FAR), verifier("c", FARTHEST)])
    assert ranks(found) == {NEAR: 0, FAR: 2}
    live = ranked([verifier("a", NEAR), verifier("b", FAR), verifier("c", FARTHEST)], weights=("w", "t"))
    assert list(ranks(live)) == [NEAR, FAR, FARTHEST]


def test_a_region_that_is_fast_enough_is_taken_like_the_best_one() -> None:
    fleet = [verifier("a", NEAR), verifier("b", FAR)]
    assert ranks(ranked(fleet, round_trips={NEAR: 10.0, FAR: 16.0})) == {NEAR: 0, FAR: 0}
    # A round trip costs a device that does not draft little.
    assert ranks(ranked(fleet, draft="")) == {NEAR: 0, FAR: 0}
    assert ranks(ranked(fleet, CONFIG.model_copy(update={"spill_share": 1.0}), draft="")) == {NEAR: 0, FAR: 2}


def test_a_far_region_is_better_than_a_slow_near_one() -> None:
    slow = verifier("a", NEAR, live=4, step_ms=200.0, min_acceptance=0.9)
    assert ranks(ranked([slow, verifier("b", FAR)])) == {FAR: 0, NEAR: 2}


def test_a_region_without_room_comes_after_those_that_have_some() -> None:
    full = verifier("a", NEAR, live=8)
    assert ranks(ranked([full, verifier("b", FAR)])) == {FAR: 0, NEAR: 2}


def test_an_unmeasured_region_is_taken_for_the_farthest_of_the_measured() -> None:
    fleet = [verifier("a", NEAR), verifier("b", FAR), verifier("c", "new")]
    found = {one.region: one for one in ranked(fleet, weights=("w", "t"))}
    assert found["new"].empty_ms == ranked([verifier("c", NEAR)], round_trips={NEAR: 250.0})[0].empty_ms
    assert "new" not in ranks(ranked(fleet))  # 250 ms is beyond the cap


def test_without_any_measurement_regions_are_all_alike() -> None:
    for trips in ({}, {"elsewhere": 5.0}):
        found = ranked([verifier("a", NEAR), verifier("b", FAR, live=6)], round_trips=trips)
        assert {(one.region, one.rank, one.empty_ms, one.full_ms) for one in found} == {("", 0, 50.0, 100.0)}


def test_a_region_where_two_verifiers_have_failed_is_left() -> None:
    fleet = [verifier(f"n{i}", NEAR) for i in range(4)] + [verifier("f", FARTHEST)]
    one_lost = ranked(fleet, failed=frozenset({"n0"}), weights=("w", "t"))
    assert one_lost[0].region == NEAR
    two_lost = ranked(fleet, failed=frozenset({"n0", "n1"}), weights=("w", "t"))
    assert two_lost[0].region == FARTHEST
    assert {one.verifier_id for one in two_lost[-2:]} == {"n0", "n1"}


REGIONS = st.sampled_from(["a", "b", "c", "d", "e"])
FLEETS = st.lists(
    st.tuples(REGIONS, st.integers(0, 8), st.floats(0.0, 1.0), st.floats(1.0, 500.0), st.booleans()),
    min_size=1,
    max_size=60,
)


@given(FLEETS, st.dictionaries(REGIONS, st.floats(0.0, 60_000.0), max_size=5), st.booleans(), st.integers(0, 99))
def test_whatever_is_measured_every_verifier_that_may_be_used_is_ranked_once(
    fleet: list[tuple[str, int, float, float, bool]], trips: dict[str, float], live: bool, seed: int
) -> None:
    verifiers = [
        verifier(f"v{i}", region, busy, min_acceptance=price, step_ms=step, draining=draining)
        for i, (region, busy, price, step, draining) in enumerate(fleet)
    ]
    request = PlacementRequest(round_trips=trips, draft="d", weights=("w", "t") if live else None)
    found = placement.candidates(targets(verifiers), request, random.Random(seed), CONFIG, GOOD, known(verifiers))
    names = {one.verifier_id for one in found}
    assert len(names) == len(found) <= len(verifiers)
    keys = [(one.failed, one.rank) for one in found]
    assert keys == sorted(keys)
    here = {region for region, *_ in fleet}
    if not here & trips.keys():
        assert len(found) == len(verifiers)
        assert {one.region for one in found} == {""}
        return
    farthest = max(trips.values())
    rtts = {region: trips.get(region, farthest) for region in here}
    near = {region for region in here if rtts[region] <= min(rtts.values()) + CONFIG.spill_ms}
    assert {one.region for one in found} == (here if live else near)
    room = {
        v.registration.region for v in verifiers if v.telemetry.live_sessions < 8 and not v.telemetry.draining
    } & near
    best = {one.region for one in found if one.rank == 0}
    assert best <= room
    assert bool(best) == bool(room)
    assert all(one.full_ms >= 0.0 and one.empty_ms > 0.0 for one in found)
    first = found[: placement.CANDIDATES_AT_ONCE]
    assert best <= {one.region for one in first}  # so that a standby may be in any of them


@given(st.floats(0.0, 2_000.0), st.floats(0.0, 2_000.0), st.floats(1.0, 500.0), st.floats(0.0, 1.0))
def test_of_equal_regions_the_nearer_is_never_ranked_behind(
    one: float, other: float, step: float, price: float
) -> None:
    near, far = sorted((one, other))
    fleet = [
        verifier("n", "n", 3, step_ms=step, min_acceptance=price),
        verifier("f", "f", 3, step_ms=step, min_acceptance=price),
    ]
    found = ranks(ranked(fleet, round_trips={"n": near, "f": far}, weights=("w", "t")))
    assert found["n"] <= found["f"]


# --- whole coordinators


def load(**changes: Any) -> dict[str, Any]:
    return {"step_cost_ms": COST, "session_cost_ms": 0.2, "step_ms": 20.0, **changes}


async def fleet(peer: Any, **places: tuple[str, ...]) -> None:
    """Register verifiers by region, each with 4 places."""
    for region, names in places.items():
        for name in names:
            await peer.join(name, capacity=4, region=region)
            await peer.report(name, **load())


async def test_a_device_is_told_where_to_measure_each_region_of_its_target(coordinator):
    await fleet(coordinator, eu=("v1", "v2"))
    assert not (await coordinator.open()).probes
    await fleet(coordinator, us=("v3",))
    probes = (await coordinator.open()).probes
    assert {probe.region for probe in probes} == {"eu", "us"}
    assert {probe.address for probe in probes if probe.region == "us"} == {"127.0.0.1:10003"}
    await fleet(coordinator, **{f"r{i}": (f"v{10 + i}",) for i in range(12)})
    assert len((await coordinator.open()).probes) == placement.PROBES
    assert {v.region for v in (await coordinator.status()).verifiers if v.verifier_id == "v3"} == {"us"}


async def test_before_it_has_measured_a_device_is_placed_by_load(coordinator):
    await fleet(coordinator, eu=("v1", "v2"), us=("v3", "v4"))
    chosen = collections.Counter([(await coordinator.open()).primary.verifier_id for _ in range(16)])
    assert chosen == {"v1": 4, "v2": 4, "v3": 4, "v4": 4}


async def test_its_region_is_filled_first_and_then_the_next_one_and_no_farther_than_the_cap(coordinator, refused):
    await fleet(coordinator, eu=("v1", "v2"), us=("v3",), asia=("v4",))
    trips = {"eu": 10.0, "us": 150.0, "asia": 300.0}
    chosen = [(await coordinator.open(draft_release="d", round_trips=trips)).primary.verifier_id for _ in range(12)]
    assert set(chosen[:8]) == {"v1", "v2"}
    assert chosen[8:] == ["v3"] * 4
    error = await refused(coordinator.open(draft_release="d", round_trips=trips))
    assert isinstance(error, Overloaded)
    assert "near enough (1 more are too far for a new session, spill_ms)" in str(error)
    assert (await coordinator.open()).primary.verifier_id == "v4"


async def test_the_standby_is_in_another_region_that_is_near_enough(coordinator):
    await fleet(coordinator, eu=("v1", "v2"), us=("v3", "v4"), asia=("v5",))
    for _ in range(6):
        opened = await coordinator.open(round_trips={"eu": 10.0, "us": 30.0, "asia": 100.0}, draft_release="d")
        assert {opened.primary.verifier_id[1], opened.standby.verifier_id[1]} & {"1", "2"}
        assert {opened.primary.verifier_id, opened.standby.verifier_id} & {"v3", "v4"}
        await coordinator.close(opened)
    opened = await coordinator.open(round_trips={"eu": 10.0, "us": 140.0, "asia": 150.0}, draft_release="d")
    assert {opened.primary.verifier_id, opened.standby.verifier_id} == {"v1", "v2"}


async def test_a_live_session_leaves_a_region_that_fails_for_any_other(coordinator):
    await fleet(coordinator, eu=("v1", "v2", "v3"), asia=("v4",))
    trips = {"eu": 10.0, "asia": 400.0}
    opened = await coordinator.open(round_trips=trips, draft_release="d")
    lost = [opened.primary.verifier_id, opened.standby.verifier_id]
    assert "v4" not in lost
    resumed = await coordinator.resume(opened, failed_verifiers=lost, round_trips=trips)
    assert resumed.primary.verifier_id == "v4"


def test_a_broken_cost_model_divides_nothing_by_zero() -> None:
    fleet = [verifier("v", "eu", step_cost_ms={1: 0.0, 65: 0.0}), verifier("w", "us")]
    assert ranked(fleet, round_trips={"eu": 10.0, "us": 20.0}, draft="d")


def test_verifiers_without_a_region_are_no_farther_than_a_usual_one() -> None:
    fleet = [verifier("v", "eu", live=8), verifier("w", "")]
    assert {one.verifier_id for one in ranked(fleet, round_trips={"eu": 10.0, "us": 190.0})} == {"v", "w"}
