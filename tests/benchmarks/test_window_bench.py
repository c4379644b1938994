"""Test the cells that benchmarks.window makes of outcomes, and the comparison of figures with those expected."""

from __future__ import annotations

from dataclasses import replace

import pytest
from outcomes import outcome

from benchmarks.support.draft_replay.client import SessionOutcome
from benchmarks.support.draft_replay.recording import RecordedRequest
from benchmarks.support.harness import Criterion, Size
from benchmarks.window import arms, live, plan
from benchmarks.window.__main__ import CELL_KEYS, KEYS, PARTS, last_line
from benchmarks.window.acceptance_criteria import criteria, summed_up, valid
from benchmarks.window.cells import (
    Cell,
    CellKey,
    ObservedWindow,
    figures,
    gap_figures,
    interval,
    line,
    predicted_over_measured,
)
from benchmarks.window.plan import (
    MACHINES,
    MINUTES,
    PACED,
    PACEDS,
    QUICK,
    QUICK_CELLS,
    REAL,
    REALS,
    RTTS_MS,
    STATIC_CELLS,
    WindowPlan,
)
from outrider.core.sampling import SamplingParams

KEY = CellKey(PACEDS, "good", 50.0)


def cell(streaming: list[float], adaptive: list[float], rounds: int = 2) -> Cell:
    """Return a cell whose sessions took so many seconds for each prompt."""
    return Cell([[outcome(s) for s in streaming]] * rounds, [[outcome(s) for s in adaptive]] * rounds)


def observed(at_s: float, tokens_per_step: float = 2.0, k: int = 4) -> ObservedWindow:
    return ObservedWindow(at_s, "s", k, 8, tokens_per_step, 1.9, 0.75, 50.0, 2.0, 2.0)


def test_a_ratio_is_of_the_same_prompt_in_the_same_round() -> None:
    assert cell([4.0, 6.0], [2.0, 6.0]).ratios == {0: [2.0, 2.0], 1: [1.0, 1.0]}


def test_an_interval_holds_the_median_and_is_wide_where_prompts_differ() -> None:
    alike, apart = (interval({i: [value] for i, value in enumerate(each)}) for each in ([1.5] * 8, range(1, 9)))
    assert alike == (1.5, 1.5, 1.5)
    assert apart[1] < apart[0] == 4.5 < apart[2]


def test_gaps_are_those_between_deliveries_however_many_tokens_one_brings() -> None:
    streamed = outcome(10.0, tokens=101, first_token_s=0.0)
    found = gap_figures([outcome(10.0, tokens=100, first_token_s=0.0, per_step=10)], [streamed])
    assert (found["gap_ms_p50"], found["gap_ms_p99"]) == (1111.1, 1111.1)
    assert (found["streaming_gap_ms_p50"], found["streaming_gap_ms_p99"]) == (100.0, 100.0)
    assert found["p99_gap_ratio"] == pytest.approx(11.111)
    assert set(gap_figures([], [streamed]).values()) == {None, 100.0}


def test_first_tokens_are_of_the_long_prompts_and_gaps_of_all_sessions() -> None:
    both = cell([4.0], [2.0], rounds=1)
    both.long_streaming = [outcome(1.0, 4, first_token_s=s) for s in (0.4, 0.4, 9.0)]
    both.long_adaptive = [outcome(10.0, 4, first_token_s=s) for s in (0.5, 0.5, 9.0)]
    found = figures(KEY, both)
    assert found["ttft_ratio"] == pytest.approx(1.25)
    assert found["p99_gap_ratio"] == pytest.approx(0.487, abs=0.01)


def test_a_cell_without_decisions_or_long_prompts_says_nothing_of_them() -> None:
    found = figures(KEY, cell([4.0], [2.0]))
    assert [found[name] for name in ("ttft_ratio", "k_median", "hit_rate", "predicted")] == [None] * 4
    assert "k -, - of the nodes accepted" in line(KEY, found)


def test_a_line_says_that_a_verifier_is_paced_and_what_was_decided() -> None:
    measured = cell([4.0, 6.0], [2.0, 3.0])
    measured.observations = [observed(1.0, k=2), observed(2.0)]
    first = measured.adaptive[0][0]
    first.steps, first.evaluated = first.tokens - 30, 40
    found = figures(KEY, measured)
    assert (found["vs_streaming"], found["slowest"], found["predicted"]) == (2.0, 2.0, 1.9)
    assert (found["bytes_up_per_token"], found["bytes_down_per_token"], found["k_median"]) == (40.0, 20.0, 4)
    shown = line(KEY, found)
    assert shown.startswith("PACED 80 + 0.05 n ms, 8 at once")
    assert "k 4, 0.75 of the nodes accepted, predicted 1.9x" in shown


def test_predictions_are_compared_with_what_came_while_they_stood() -> None:
    measured = Cell([], [[outcome(10.0, first_token_s=0.0, tokens=200, per_step=2, session_id="s")]])
    begun = measured.played[0].delivered_s[0]
    measured.observations = [
        observed(begun + 2.0, 3.0),
        observed(begun + 4.0, 1.0),
        observed(begun + 6.0, 50.0),
    ]
    assert predicted_over_measured(measured) == [pytest.approx(1.0, abs=0.03)]
    measured.observations = measured.observations[:1]
    assert predicted_over_measured(measured) == []


def test_the_grid_is_whole_and_its_quick_part_has_a_few_cells() -> None:
    grid = [key for group in WindowPlan().sites() for keys in group for key in keys]
    assert len(set(grid)) == len(grid) == len(RTTS_MS) * 2 * len(MACHINES)
    assert [len(group) for group in QUICK.sites()] == [2]
    assert {(key.machine, key.rtt_ms) for group in QUICK.sites() for keys in group for key in keys} == QUICK_CELLS


def test_eight_cells_of_the_grid_are_swept_by_statics() -> None:
    swept = {CellKey(machine, draft, rtt) for machine, cells in STATIC_CELLS for draft, rtt in cells}
    assert len(swept) == 8
    assert swept <= {key for group in WindowPlan().sites() for keys in group for key in keys}


def test_a_criterion_that_is_not_met_says_so() -> None:
    assert str(Criterion.bound("x", 0.9, at_least=1.0)) == "x: 0.9, wanted at least 1, NOT MET"
    assert str(Criterion.bound("x", 0.9, at_most=1.0)) == "x: 0.9, wanted at most 1"
    assert str(Criterion.bound("x", 0.9, at_least=0.9, at_most=1.0)) == "x: 0.9, wanted at least 0.9 and at most 1"


def test_every_figure_that_is_known_is_held_against_what_is_wanted() -> None:
    result = {
        "cells": [figures(KEY, cell([4.0], [4.4])), figures(CellKey(REAL, "narrow", 1.0), cell([4.0], [2.0]))],
        "statics": [{"cell": str(KEY), "vs_best": 0.9}],
        "paced": {"1": 2.7, "200": 1.0},
        "transition": {"settle_s": 4.0, "vs_streaming": 1.0, "changes": 1},
        "brier_skill": 0.1,
    }
    short = [each.name for each in criteria(result) if not each.met]
    assert short == [
        f"PACED, 8 at once, good, 50 ms, {what} over streaming"
        for what in ("upper bound", "lower bound", "the slowest session")
    ] + [
        f"{KEY}, over the best static",
        "PACED, match near 0.8, 200 ms, over streaming",
        "PACED, transition, seconds until the worst session settled",
    ]
    assert list(criteria({})) == []


def test_texts_that_teach_a_verifier_are_played_nowhere_and_each_session_has_its_own() -> None:
    def call(number: int, temperature: float, *, repeats: bool = False) -> RecordedRequest:
        output = (1, 2) * 20 if repeats else tuple(range(40))
        return RecordedRequest(str(number), (number,), SamplingParams(temperature=temperature), 40, output)

    calls = [call(number, 0.8, repeats=number == 1) for number in range(12)] + [call(12, 0.0), call(13, 0.0)]
    found = arms._Texts.of(calls, replace(plan.SMOKE, arms=3, arm_lessons=4))
    assert found.lessons == [8, 9, 10, 11]
    assert found.groups == {"sampled": [0, 2], "sampled, repetitive": [1], "greedy": [12, 13]}
    assert list(found.played) == [0, 1, 2, 12, 13]
    assert found.several == [0, 2, 3, 4, 5, 6, 7]


def test_both_are_held_against_the_better_of_device_and_verifier_by_kind_of_text() -> None:
    seconds = {"streaming": 4.0, "device": 2.0, "cloud": 2.5, "both": 2.5, "no draft": 3.2}
    outcomes = {(name, number): outcome(s) for name, s in seconds.items() for number in (0, 1)}
    outcomes |= {(name, 2): outcome(4.0) for name in seconds}
    found = arms.distance_figures(50.0, outcomes, {"sampled": [0, 1], "greedy, repetitive": [2]})
    assert found["sampled"]["better"] == "device"
    assert found["sampled"]["both_over_better"] == 0.8
    assert found["sampled"]["over_streaming"] == {
        "streaming": 1.0,
        "device": 2.0,
        "cloud": 1.6,
        "both": 1.6,
        "no draft": 1.25,
    }
    assert found["greedy, repetitive"]["both_over_better"] == 1.0
    summed = arms.summary([found])
    assert summed == {
        "both_over_best": 0.8,  # the least of all kinds of texts
        "both_vs_streaming": {"50": 1.6},
        "no_draft_vs_streaming": {"50": 1.25},
    }
    assert [each.name for each in criteria(summed) if not each.met] == [
        "arms, both over the better of device and cloud, the least",
        "arms, without a draft over streaming, 50 ms",
    ]


def test_replayed_devices_are_held_against_live_ones_by_text() -> None:
    seconds = {"streaming": (4.0, 8.0), "replayed": (2.0, 4.0), "live": (2.5, 4.0)}
    found = live.live_figures(PACED, 50.0, {arm: [outcome(s) for s in each] for arm, each in seconds.items()})
    assert (found["replayed_vs_streaming"], found["live_vs_streaming"]) == (2.0, 1.8)
    assert (found["replayed_over_live"], found["replayed_over_live_95"]) == (1.125, [1.0, 1.25])
    assert (found["texts"], found["tokens_per_step"]["live"]) == (2, 1.0)
    [flattered] = criteria({"live": [found]})
    assert str(flattered).endswith(
        "50 ms, replayed devices over live ones: 1.125, wanted at least 0.95 and at most 1.05, NOT MET"
    )
    assert not flattered.fails(Size.FULL)


def test_what_was_to_be_measured_and_was_not_is_short_and_skill_must_be_above_nothing() -> None:
    without, unmeasured = cell([4.0], [2.0]), cell([4.0], [2.0])
    unmeasured.long_streaming, unmeasured.long_adaptive = [SessionOutcome()], [SessionOutcome()]
    result = {
        "cells": [figures(KEY, without), figures(KEY, unmeasured)],
        "transition": {"settle_s": None, "vs_streaming": 1.0, "changes": 0},
        "brier_skill": 0.0,
        "minutes": 91.0,
    }
    assert [str(each) for each in criteria(result) if not each.met] == [
        "PACED, 8 at once, good, 50 ms, first token over streaming's (prompts read at this CPU's speed):"
        " nothing, wanted at most 1.05, NOT MET",
        "brier_skill: 0, wanted above 0, NOT MET",
        "PACED, transition, seconds until the worst session settled: nothing, wanted at most 3, NOT MET",
        "minutes of the full run: 91, wanted at most 90, NOT MET",
    ]


def test_cells_that_are_slower_than_streaming_are_counted() -> None:
    cells = [figures(KEY, cell([4.0, 4.0], adaptive)) for adaptive in ([2.0, 2.0], [2.0, 4.4], [4.4, 4.4])]
    assert summed_up(cells).startswith("of 3 cells 1 have a median under 0.97 of streaming, 2 a lower 95% bound")
    assert summed_up(cells).endswith("not measured in 3 of them")


def test_the_last_line_has_all_its_keys_whatever_was_played() -> None:
    nothing = last_line({})
    assert tuple(nothing) == KEYS
    assert nothing.pop("cells") == {}
    assert set(nothing.values()) == {None}
    changed = {"settle_s": 1.0, "settle_s_median": 0.5, "vs_streaming": 1.1, "changes": 2}
    other = CellKey(REAL, "narrow", 1.0)
    played = [figures(KEY, cell([4.0], [2.0])), figures(other, cell([4.0], [4.4]))]
    some = last_line({"cells": played, "transition": changed})
    assert tuple(some["cells"]["paced, 8, good"]["50"]) == CELL_KEYS
    assert some["worst"]["vs_streaming"] == some["cells"]["real CPU, 1, narrow"]["1"]["vs_streaming"] < 1
    assert some["worst"]["ttft_ratio"] is None
    assert some["transition"] == {"settle_s": 1.0, "settle_s_median": 0.5, "vs_streaming": 1.1}


def test_a_full_run_plays_parts_that_are_expected_to_take_no_longer_than_they_may() -> None:
    assert sum(minutes for part, minutes in MINUTES.items() if part in ("recordings", *PARTS)) <= 90


def test_arms_whose_speed_depends_on_this_cpu_are_played_first_equally_often() -> None:
    plan = WindowPlan()
    assert plan.singles % 2 == plan.rounds_of(REALS) % 2 == 0
    assert [plan.rounds_of(machine) for machine in (REAL, PACED, PACEDS)] == [1, 1, 1]


def test_a_paced_machine_says_its_pace_to_the_verifier() -> None:
    assert PACED.pace is not None
    assert PACED.pace.environment == {"PACED_PASS_MS": "30.0", "PACED_ROW_MS": "0.05"}
    assert REAL.pace is None
    assert str(REAL) == "real CPU, 1 at once"


def test_a_figure_that_falls_short_fails_no_run_and_an_invalid_measurement_does() -> None:
    slower = [{"rtt_ms": 1.0, "outrider_over": {"ucb windows": [0.9, 0.8, 1.1], "specedge": [1.0, 0.9, 1.1]}}]
    found = [*criteria({"brier_skill": 0.0, "policies": slower})]
    assert [each.name for each in found if not each.met and "ucb windows" in each.name]
    assert not [each.name for each in found if not each.met and "specedge" in each.name]
    assert not [each for each in found if each.fails(Size.FULL)]
    assert valid(["PACED: 3% of the passes took longer"]).fails(Size.FULL)
    assert not valid([]).fails(Size.FULL)
