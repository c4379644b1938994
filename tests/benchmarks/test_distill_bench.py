"""Test how `benchmarks.distill` decides what is lost, kept and closed, and what it prints."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from benchmarks.acceptance import DraftAcceptance
from benchmarks.distill import devices, identity, kills, learning, plots, safety
from benchmarks.distill.__main__ import DistillResult, judge_gain
from benchmarks.distill.answer import DeviceAnswer
from benchmarks.distill.bad_releases import BAD_RELEASES, Refusal, flipped
from benchmarks.distill.gain import DraftGain, interval, per_step
from benchmarks.distill.run_log import RunLog
from benchmarks.distill.size import FULL, QUICK
from benchmarks.distill_losses import compared
from benchmarks.support import harness, proc, questions, texts
from cloud_verifier.distill.gguf.eval_gguf import TREE, DraftCounts, steps
from cloud_verifier.distill.publishing.release_client import ReleaseRecord
from outrider.wire.manifest import Manifest

BEFORE = {"arithmetic": 2.0, "code": 3.0}


def answer(**changes: object) -> DeviceAnswer:
    return dataclasses.replace(DeviceAnswer(0, "code", "a prompt", {}, 0.0, 1.0, tokens=[1, 2, 3]), **changes)


def gain(after: float, reference: float = 4.0, code: float = 3.0) -> DraftGain:
    return DraftGain(BEFORE, {"arithmetic": after, "code": code}, {"arithmetic": reference, "code": 3.0})


def test_an_answer_comes_through_its_line_unchanged() -> None:
    sent = answer(swaps_s=[0.25], refused={"worse": 1}, options={"seed": 7}, error="")
    assert DeviceAnswer.of_line(sent.line.encode()) == sent


@pytest.mark.parametrize(
    ("got", "lost"), [([1, 2, 3], 0), ([1, 2], 1), ([1, 2, 3, 4], 1), ([1, 9, 3], 2), ([], 3), ([9, 9, 9], 3)]
)
def test_every_token_from_the_first_difference_on_is_lost(got: list[int], lost: int) -> None:
    assert identity.differing_tokens(got, (1, 2, 3)) == lost


def test_every_request_with_a_swap_is_compared_and_no_failed_one_is() -> None:
    answers = [answer(device=i, swaps_s=[0.1] if i % 5 == 0 else []) for i in range(50)]
    answers[0] = dataclasses.replace(answers[0], error="Unavailable: gone")
    taken = identity.chosen(answers, 3)
    assert {a.device for a in taken} >= set(range(5, 50, 5))
    assert 9 <= len(taken) <= 12 and answers[0] not in taken


def test_the_gap_is_closed_by_the_share_of_the_way_to_the_reference() -> None:
    found = gain(after=3.5, code=2.7)
    assert found.gap == 2.0 and found.gap_closed == 0.75
    assert found.code_loss == pytest.approx(0.1)


def test_a_draft_that_got_worse_closes_less_than_nothing() -> None:
    assert gain(after=1.0).gap_closed == -0.5


@pytest.mark.parametrize(
    ("found", "broken"),
    [
        (gain(after=3.7), []),
        (gain(after=3.5), ["gap closed"]),
        (gain(after=3.7, code=2.7), ["lost on code"]),
        (gain(after=2.4, reference=2.4), ["the gap"]),
    ],
)
def test_what_is_wanted_of_the_learnt_draft_can_fail(found: DraftGain, broken: list[str]) -> None:
    run_log, result = RunLog(), DistillResult()
    judge_gain(found, FULL, run_log, result)
    assert [check.name for check in run_log.broken] == broken
    assert result.tokens_per_step["after"] == found.after["arithmetic"]
    assert result.gap_closed == round(found.gap_closed, 3)


def test_a_quick_run_promises_nothing_of_what_is_learnt_but_that_there_is_something_to_learn() -> None:
    run_log = RunLog()
    judge_gain(gain(after=2.0), QUICK, run_log, DistillResult())
    assert [check.name for check in run_log.checks] == ["the gap"]


def test_tokens_per_step_are_sums_over_texts_and_not_means_of_texts() -> None:
    counted = [
        ("code", 10, DraftCounts(0, 9, 2)),
        ("code", 30, DraftCounts(0, 9, 18)),
        ("sums", 4, DraftCounts(0, 9, 4)),
    ]
    assert per_step(counted) == {"code": 2.0, "sums": 1.0}


def test_texts_that_repeat_themselves_are_counted_apart_and_greedy_and_sampled_ones_too() -> None:
    counted = [
        ("code, greedy", 30, DraftCounts(0, 9, 10)),
        ("code, sampled", 10, DraftCounts(0, 9, 10)),
        ("code, repetitive", 70, DraftCounts(0, 9, 10)),
    ]
    apart = {"code, greedy": 3.0, "code, sampled": 1.0, "code, repetitive": 7.0}
    assert per_step(counted) == {"code": 2.0, **apart}


def test_the_interval_is_of_texts_that_do_not_repeat_themselves() -> None:
    def counted(steps: int, repetitive: int) -> list[tuple[str, int, DraftCounts]]:
        return [
            ("arithmetic, sampled", 60, DraftCounts(0, 60, steps)),
            ("arithmetic, repetitive", 60, DraftCounts(0, 60, repetitive)),
            ("code, greedy", 60, DraftCounts(0, 60, 9)),
        ]

    low, high = interval(counted(30, 30), counted(15, 30), counted(12, 10), [0, 0, 1])
    assert low == high == pytest.approx(2 / 3)


def test_a_text_is_named_by_its_kind_and_sampling_or_as_one_that_repeats_itself() -> None:
    assert texts.grouped("code", "sampled", range(90)) == "code, sampled"
    assert texts.grouped("code", "sampled", [1, 2, 3, 4] * 20) == "code, repetitive"
    assert texts.groups_of("code, sampled") == ("code", "code, sampled")
    assert texts.groups_of("code, repetitive") == ("code, repetitive",)
    assert texts.groups_of("code") == ("code",)


def test_losses_of_kinds_whose_texts_all_repeat_themselves_are_not_compared() -> None:
    one = DraftAcceptance(2.0, 0.5)
    others = {"before": {"arithmetic": one, "code": one}, "reference": {"arithmetic": DraftAcceptance(4.0, 0.9)}}
    found = {"arithmetic": DraftAcceptance(3.0, 0.7), "code, repetitive": one}
    assert compared(found, others) == {"gap_closed": None, "code_loss": None}
    assert compared({**found, "code": one}, others) == {"gap_closed": 0.5, "code_loss": 0.0}


def test_a_draft_that_is_always_right_takes_a_step_for_seven_tokens() -> None:
    assert steps(np.zeros(70, np.int8), 6, TREE) == 10


def test_training_beyond_the_checkpoint_is_what_a_kill_lost() -> None:
    lines = [{"step": step, "seconds": 2.0 * step} for step in range(1, 8)]
    assert learning.lost_seconds(lines, 4) == 6.0
    assert learning.lost_seconds(lines, 7) == 0.0
    assert learning.lost_seconds(lines, 0) == 14.0


def test_where_a_training_went_on_is_read_from_its_own_words(tmp_path: Path) -> None:
    log = tmp_path / "training.log"
    assert learning.resumed(log) == []
    log.write_text("10:00:01 step 4\n")
    assert learning.resumed(log) == []
    log.write_text("10:00:01 going on from step 4\n10:01:00 going on from step 9\n")
    assert learning.resumed(log) == [4, 9]


def test_a_line_of_the_curve_that_is_not_whole_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "curve.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert learning.last_step(tmp_path) == 2


@pytest.mark.parametrize(
    ("after", "kept"),
    [
        ({"a": (1, "stable"), "b": (2, "canary")}, True),
        ({"a": (1, "stable"), "b": (2, "rolled_back")}, True),
        ({"a": (1, "stable")}, False),
        ({"a": (1, "superseded"), "b": (2, "canary")}, False),
        ({"a": (3, "stable"), "b": (2, "canary")}, False),
        ({}, False),
    ],
)
def test_a_release_that_is_gone_or_another_is_lost(after: dict[str, tuple[int, str]], kept: bool) -> None:
    assert kills.kept({"a": (1, "stable"), "b": (2, "canary")}, after) is kept


def test_a_failure_is_excused_only_by_an_outage_in_which_it_began() -> None:
    late, early = (answer(begun=begun, ended=9.0, error="Unavailable") for begun in (4.0, 2.0))
    assert kills.unexplained([late, early, answer(begun=2.0)], [(3.0, 5.0)]) == [early]


def test_only_requests_in_their_midst_say_that_a_kill_was_survived() -> None:
    def one(first: float, ended: float, error: str = "") -> DeviceAnswer:
        return DeviceAnswer(0, "code", "", {}, 90.0, ended, first=first, error=error)

    under_way, over, opening, failed = one(99, 101), one(91, 99), one(100.5, 105), one(0, 101, "gone")
    assert kills.went_through([under_way, over, opening, failed], 100.0) == 1


@pytest.mark.parametrize(
    ("state", "reason", "found"),
    [
        ("rolled_back", "worse than the bound of 0.05 allows: first proposal accepted at 60.0% of positions", True),
        ("rolled_back", "undecided after 240 s: first proposal accepted at 72.8% of positions", False),
        ("stable", "not worse than the bound", False),
    ],
)
def test_a_trial_that_found_nothing_out_does_not_count_as_rolled_back_on_evidence(
    state: str, reason: str, found: bool
) -> None:
    known = ReleaseRecord(cast(Manifest, None), b"", state, reason)
    assert safety.judged_worse(known) is found


def test_the_interval_holds_the_share_and_is_narrow_where_texts_are_alike() -> None:
    def counted(*steps: int) -> list[tuple[str, int, DraftCounts]]:
        return [("arithmetic", 60, DraftCounts(0, 60, count)) for count in steps] + [
            ("code", 60, DraftCounts(0, 60, 9))
        ]

    low, high = interval(counted(30, 30), counted(15, 15), counted(12, 12), range(3))
    assert low == high == pytest.approx(2 / 3)
    unlike = counted(*[30] * 10), counted(*[12, 30] * 5), counted(*[12] * 10)
    low, high = interval(*unlike, range(11))
    assert 0.0 <= low < 0.35 < high <= 1.0
    low, high = interval(*unlike, [n // 2 for n in range(11)])
    assert low == high, "both texts of a prompt are drawn together"


def test_the_parent_of_a_process_with_brackets_in_its_name_is_found() -> None:
    assert proc.stat_fields("12 (a (b) c) S 34 12 12 0 -1")[1] == "34"


def test_a_refusal_holds_only_for_what_was_wanted_with_a_message_and_the_same_text() -> None:
    good = Refusal("a wrong key", "signature", ("signature",), "a draft release is not used", True, True)
    assert good.held
    for bad in ({"got": ()}, {"got": ("altered",)}, {"message": ""}, {"identical": False}, {"kept": False}):
        assert not dataclasses.replace(good, **bad).held


def test_each_lie_is_refused_for_a_reason_of_its_own() -> None:
    assert sorted(lie.wanted for lie in BAD_RELEASES) == ["altered", "signature", "tokenizer", "truncated", "version"]


def test_a_tampered_file_differs_in_one_bit() -> None:
    data = bytes(range(100))
    changed = [a ^ b for a, b in zip(data, flipped(data), strict=True) if a != b]
    assert changed == [1]


def test_without_a_swap_the_time_of_swaps_is_0() -> None:
    assert safety.swaps([], RunLog()) == (0.0, 0.0)


def test_requests_with_a_swap_belong_to_no_release_in_the_plot() -> None:
    answers = [answer(release="r", guessed=2), answer(release="r", guessed=3, swaps_s=[0.1])]
    assert plots.binned(answers, 0.0) == {("r", "code"): [(5.0, 2 / 3)]}


def test_devices_ask_nothing_that_is_measured_with_and_nothing_of_one_another() -> None:
    measured = {prompt.text for prompt in harness.prompts("heldout")}
    asked = [set(questions.arithmetic(300, seed)) for seed in range(8)]
    assert not measured & set().union(*asked)
    assert len(set().union(*asked)) > 0.99 * sum(map(len, asked))


def test_every_other_request_is_sampled_and_no_two_have_the_same_seed() -> None:
    options = [devices.options_of(device, asked, 64) for device in range(8) for asked in range(20)]
    assert sum("temperature" in one for one in options) == len(options) / 2
    assert len({one["seed"] for one in options}) == len(options)
