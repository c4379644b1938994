"""Test the figures that the parts of benchmarks.window derive: statics, the model, transitions, recordings."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from outcomes import outcome

from benchmarks.support import harness
from benchmarks.support.draft_replay.client import SessionJob, SessionOutcome
from benchmarks.support.pace import WAITS
from benchmarks.window.cells import Cell, CellKey, ObservedWindow
from benchmarks.window.draft_recordings import long_prompts, match_rate, nearest
from benchmarks.window.model import against, predicted, windows
from benchmarks.window.plan import PACED, PACEDS, STATICS, StaticWindow, WindowPlan
from benchmarks.window.policies import ARMS, not_in_rounds, trip_figures
from benchmarks.window.recording_library import RecordingLibrary
from benchmarks.window.statics import (
    ADAPTIVE,
    STREAMING,
    StaticScore,
    best_single,
    over_streaming,
    rotated,
    score,
    together,
)
from benchmarks.window.testbed import CorePair, VerifierMachine, WindowTestbed, check, play
from benchmarks.window.transitions import (
    ChangePeriod,
    over_time,
    periods_of_draft,
    periods_of_link,
    settled_s,
    summary,
    transition,
)
from cloud_verifier import app
from coordinator.window.streaming import LinkTiming
from outrider.core.acceptance.history import HIT, MISS, SIBLING


def observed(at_s: float, k: int, depth: int = 8) -> ObservedWindow:
    return ObservedWindow(at_s, "s", k, depth, 2.0, 1.5, 0.8, 50.0, 2.0, 2.0)


def test_the_best_static_is_scored_on_the_prompts_that_did_not_choose_it() -> None:
    cell = {ADAPTIVE: [10.0] * 4, "early": [20.0, 20.0, 5.0, 5.0], "late": [5.0, 5.0, 20.0, 20.0]}
    found = score(cell)
    assert found.best == ("early", "late")
    assert found.vs_best == 2.0


def test_a_verifier_that_is_slower_by_itself_makes_its_window_no_slower() -> None:
    for slowness in (1.0, 1.1):
        streamed, drafted = [outcome(4.0 * slowness)], [outcome(2.0 * slowness)]
        assert over_streaming(streamed, drafted) == [pytest.approx(2.0)]


def test_every_prompt_is_an_arms_turn_alone_and_half_of_them_where_several_sessions_go_together() -> None:
    assert together([5, 6, 7], 1) == [[5], [6], [7]]
    assert together([1, 2, 3, 4], 8) == [[1, 2], [3, 4]]


def test_each_arm_comes_first_in_turn() -> None:
    assert [rotated(["a", "b", "c"], turn) for turn in (0, 1, 3)] == [["a", "b", "c"], ["b", "c", "a"], ["a", "b", "c"]]


def test_policies_are_compared_text_by_text_with_streaming_and_with_the_product() -> None:
    seconds = {"streaming": 4.0, "outrider": 2.0, "ucb windows": 2.5, "ucb rounds": 4.0, "specedge": 3.0}
    found = trip_figures(50.0, {name: [outcome(each), outcome(2 * each)] for name, each in seconds.items()})
    assert set(ARMS) == set(seconds)
    assert found["texts"] == 2
    assert found["over_streaming"] == {
        name: [pytest.approx(4.0 / each, abs=1e-3)] * 3 for name, each in seconds.items() if name != "streaming"
    }
    assert found["outrider_over"] == {
        name: [pytest.approx(seconds[name] / 2.0, abs=1e-3)] * 3 for name in ("ucb windows", "ucb rounds", "specedge")
    }


def test_rounds_that_are_shorter_than_a_round_trip_and_a_pass_are_none() -> None:
    slow, fast = ([outcome(each, tokens=41, first_token_s=0.0)] for each in (4.0, 2.0))
    played = {name: fast if name == "specedge" else slow for name in ARMS}
    assert not_in_rounds(50.0, played) == ["specedge, 50 ms: rounds of 50 ms"]
    assert not_in_rounds(10.0, played) == []


def test_the_best_single_static_is_best_over_all_cells_together() -> None:
    scores = [
        StaticScore(("a", "a"), 1.0, {"a": 0.5, "b": 0.9, STREAMING: 2.0}),
        StaticScore(("b", "b"), 1.0, {"a": 3.2, "b": 0.9, STREAMING: 1.0}),
    ]
    assert best_single(scores) == ("b", 0.9)


def test_a_statics_directive_holds_its_levels_in_nodes() -> None:
    for static in STATICS:
        directive = static.directive(PACED)
        assert directive.nodes_per_step == static.k * static.nodes_per_level
        assert static.k <= directive.window_depth <= directive.window_nodes <= 64


def test_a_static_windows_draft_wait_is_a_share_of_the_machines_step() -> None:
    static = StaticWindow(4, 8, 2, 0.25)
    assert (static.directive(PACED).draft_wait_ms, static.directive(PACEDS).draft_wait_ms) == (8, 20)


def test_the_model_takes_the_best_of_all_windows() -> None:
    way = LinkTiming(0.001, 0.001, lambda nodes: 0.030)
    good, bad = (predicted(history, way) for history in (bytes([HIT] * 60), bytes([MISS] * 60)))
    assert good > 4 / 0.030
    assert bad == pytest.approx(1 / 0.030, rel=0.01)
    assert len({window.k for window in windows(way)}) > 4


def test_measured_speed_is_held_against_the_recordings_own_prediction() -> None:
    plain, fast = outcome(3.1, 97, first_token_s=0.1), outcome(1.6, 97, first_token_s=0.1)
    found = against(CellKey(PACED, "near", 50.0), Cell([[plain]], [[fast]]), [bytes([MISS] * 97)], 0.001)
    assert found.vs_streaming == pytest.approx(2.0, abs=0.01)
    assert found.predicted == pytest.approx(1.0, abs=0.01)
    assert found.vs_model == pytest.approx(2.0, abs=0.03)


def test_a_line_that_turns_has_a_span_after_each_turn_that_the_session_lived_to_see() -> None:
    periods = periods_of_link(outcome(6.0), ((2.0, 300.0), (5.0, 5.0), (8.0, 300.0)))
    assert [(s.name, s.since_s, s.until_s) for s in periods] == [("to 300 ms", 52.0, 55.0), ("to 5 ms", 55.0, 56.0)]


def test_a_draft_fails_where_the_output_reaches_the_span() -> None:
    even = outcome(10.0, tokens=101, first_token_s=0.0)
    assert [(s.name, s.since_s, s.until_s) for s in periods_of_draft(even, (20, 60))] == [
        ("collapse", pytest.approx(52.0), pytest.approx(56.0)),
        ("recovery", pytest.approx(56.0), pytest.approx(60.0)),
    ]


def test_a_transition_counts_three_seconds_of_tokens_against_streaming() -> None:
    fast, slow = outcome(10.0, 201, first_token_s=0.0), outcome(10.0, 101, first_token_s=0.0)
    found = transition(ChangePeriod("x", 52.0, 60.0), fast, slow, [])
    assert found.vs_streaming == pytest.approx(2.0, abs=0.05)


PERIOD = ChangePeriod("x", 50.0, 60.0)


def test_a_window_has_settled_when_it_stays_near_the_last_one() -> None:
    seen = [
        observed(50.5, 8),
        observed(51.0, 2),
        observed(52.0, 8),
        observed(53.0, 3, 6),
        observed(59.5, 2),
    ]
    assert settled_s(PERIOD, seen) == 3.0
    assert settled_s(PERIOD, [observed(50.5, 2), observed(59.5, 2)]) == 0.5
    changing = transition(PERIOD, outcome(10.0, session_id="s"), outcome(10.0), seen)
    assert changing.changes == 3


def test_a_window_that_moves_to_and_fro_in_the_last_second_settles_there_or_never() -> None:
    assert settled_s(PERIOD, [observed(51.0, 2), observed(59.2, 8), observed(59.6, 2)]) == pytest.approx(9.6)
    assert settled_s(PERIOD, [observed(51.0, 2, 8), observed(59.6, 2, 11)]) == pytest.approx(9.6)
    assert settled_s(PERIOD, [observed(51.0, 2)]) is None


def test_a_summary_is_of_the_worst_session() -> None:
    found = [
        transition(PERIOD, outcome(10.0, session_id="s"), outcome(10.0), seen)
        for seen in (
            [observed(51.0, 2), observed(52.0, 4), observed(59.5, 4)],
            [observed(51.0, 2), observed(59.5, 2)],
        )
    ]
    assert summary(found)["x"].changes == 1
    assert summary(found)["x"].settle_s == 2.0
    assert summary([*found, transition(PERIOD, outcome(10.0), outcome(10.0), [])])["x"].settle_s is None


def test_speed_over_time_is_of_the_second_before() -> None:
    found = list(over_time(outcome(5.0, 51, first_token_s=0.0)))
    assert (found[0][0], found[-1][0]) == pytest.approx((1.0, 5.0))
    assert [speed for _, speed in found] == pytest.approx([10.0] * len(found), abs=1.0)


def test_long_prompts_begin_differently_and_are_as_long_as_asked() -> None:
    prompts = [[1] * 40, [2] * 40, [3] * 40]
    made = long_prompts(prompts, 2, 100)
    assert [(len(prompt), prompt[0]) for prompt in made] == [(100, 1), (100, 2)]
    with pytest.raises(ValueError, match="120 tokens of prompts make none of 500"):
        long_prompts(prompts, 1, 500)


def test_recordings_are_chosen_by_how_near_their_match_is() -> None:
    shares = [0.5, 0.82, 0.99, 0.78, 0.74]
    assert nearest(shares, 3) == ([1, 3, 4], 2) or nearest(shares, 3) == ([3, 1, 4], 2)
    assert match_rate(bytes([HIT, SIBLING, MISS, HIT])) == 0.5


def test_devices_have_learned_from_other_prompts_than_those_that_are_played(tmp_path: Path) -> None:
    played, teaching = ({prompt.text for prompt in harness.prompts(split)} for split in ("heldout", "tuning"))
    assert len(played) > 40 <= len(teaching)
    assert not played & teaching
    pair = harness.Pair(tmp_path, tmp_path, tmp_path)
    with pytest.raises(ValueError, match="1 prompts are to be played and to teach"):
        RecordingLibrary(pair, WindowPlan(), {"a": [1, 2], "b": [3]}, {"c": [3]}, tmp_path)


class RecordingSwarm:
    """Stand in for a swarm whose sessions take 0.2 s each."""

    def __init__(self) -> None:
        self.began: dict[int, float] = {}

    async def play(self, job: SessionJob) -> SessionOutcome:
        self.began[job.recording] = asyncio.get_running_loop().time()
        await asyncio.sleep(0.2)
        return SessionOutcome(tokens=job.recording, finish="length")


async def test_sessions_arrive_one_by_one_and_later_ones_take_the_places_that_become_free() -> None:
    swarm = RecordingSwarm()
    found = await play(swarm, [SessionJob(n) for n in range(4)], 2, over_s=0.1)  # type: ignore[arg-type]
    assert [each.tokens for each in found] == [0, 1, 2, 3]
    since = [swarm.began[n] - swarm.began[0] for n in range(4)]
    assert since == pytest.approx([0.0, 0.05, 0.2, 0.25], abs=0.04)


def test_a_session_that_was_cut_off_as_asked_has_not_failed() -> None:
    jobs = [SessionJob(0, ending="cancel", after=5), SessionJob(0)]
    check(jobs, [SessionOutcome(finish="cancelled"), SessionOutcome(finish="length")])
    with pytest.raises(RuntimeError, match="1 sessions failed"):
        check(jobs, [SessionOutcome(finish="cancelled"), SessionOutcome(finish="cancelled")])
    with pytest.raises(RuntimeError, match="2 tokens are not as recorded"):
        check(jobs[:1], [SessionOutcome(finish="cancelled", wrong=2)])


async def test_a_static_window_reaches_the_verifier_by_settings_that_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, str] = {}

    class Testbed(WindowTestbed):
        @contextlib.asynccontextmanager
        async def _cluster(self, cores: CorePair, *, controlled: bool, ucb: bool = False) -> AsyncIterator[Any]:
            yield None

        @contextlib.asynccontextmanager
        async def _verifier(self, *given_to_it: Any) -> AsyncIterator[Any]:
            environment: Mapping[str, str] = given_to_it[-1]
            given.update(environment)
            yield None

    directive = replace(
        app.parse(["--model", "target"]).directive, window_nodes=7, window_depth=5, nodes_per_step=3, draft_wait_ms=11
    )
    testbed = Testbed(harness.Pair.in_folder(harness.ROOT / "models"))
    async with testbed.static_site(VerifierMachine(sessions=1), CorePair(0, 0), directive, waits=True):
        assert given.pop(WAITS) == "1"
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert app.parse(["--model", "target"]).directive == directive
