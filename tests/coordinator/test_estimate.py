"""Test `outrider estimate` against what can be computed by hand."""

import json

import pytest

from coordinator.cli import main
from coordinator.cli.estimate import outcomes
from outrider.core.acceptance.history import HIT, MISS

NEAR = "--step-ms 30 --rtt-ms 0 --draft-ms 0"


def estimated(arguments: str, capsys: pytest.CaptureFixture[str]) -> dict:
    with pytest.raises(SystemExit) as ended:
        main(["estimate", *arguments.split(), "--json"])
    assert ended.value.code == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("acceptance", [0.3, 0.5, 0.7, 0.9])
def test_without_distance_and_costs_the_speed_up_is_the_geometric_sum(acceptance, capsys):
    found = estimated(f"{NEAR} --acceptance {acceptance}", capsys)
    length = found["speculation_length"]
    expected = sum(acceptance**n for n in range(length + 1))
    assert length >= 4
    assert found["speed_up"] == pytest.approx(expected, rel=0.05)
    assert found["acceptance_length"] == found["speed_up"]
    assert found["tokens_per_s_per_user"] == pytest.approx(found["speed_up"] * 1e3 / 30.0, abs=0.01)


def test_it_pays_less_with_the_distance_with_costly_tokens_and_with_a_slow_draft(capsys):
    pair = "--step-ms 30 --acceptance 0.7 --users 4"
    found = estimated(f"{pair} --rtt-ms 50 --draft-ms 4", capsys)
    by_distance = [row["speed_up"] for row in found["distances"]]
    assert [row["rtt_ms"] for row in found["distances"]] == [0.0, 10.0, 25.0, 50.0, 100.0, 200.0]
    assert by_distance[0] > by_distance[3] > by_distance[4] > by_distance[5] >= 1.0
    assert found["speed_up"] == by_distance[3] and found["pays"]
    assert estimated(f"{pair} --rtt-ms 50 --draft-ms 4 --token-ms 5", capsys)["speed_up"] < found["speed_up"]
    assert estimated(f"{pair} --rtt-ms 50 --draft-ms 20", capsys)["speed_up"] < found["speed_up"]


@pytest.mark.parametrize(
    "arguments",
    [
        f"{NEAR} --acceptance 0",
        "--step-ms 30 --rtt-ms 400 --draft-ms 4 --acceptance 0.3",
        "--step-ms 5 --rtt-ms 0 --draft-ms 50 --acceptance 0.9",
        f"{NEAR} --acceptance 0.5 --users 8 --token-ms 30",
    ],
)
def test_what_gains_nothing_does_not_pay(arguments, capsys):
    found = estimated(arguments, capsys)
    assert not found["pays"] and found["speed_up"] == pytest.approx(1.0, abs=0.02)
    assert "does not pay" in found["summary"]


def test_a_curve_says_what_steps_of_more_tokens_cost(capsys):
    user = "--rtt-ms 0 --draft-ms 0 --acceptance 0.7 --users 4"
    line = estimated(f"{user} --step-ms 30 --token-ms 1", capsys)
    assert estimated(f"{user} --step-ms 1:30,2048:2077", capsys) == line
    assert estimated(f"{user} --step-ms 1:30,11:40,21:50", capsys) == line  # its last line goes on
    flat = estimated(f"{user} --step-ms 16:34,1:30", capsys)  # 4 users: 30.8 ms without draft tokens
    assert flat["tokens_per_s_per_user_without"] == pytest.approx(1e3 / 30.8, abs=0.01)
    assert flat["speed_up"] > line["speed_up"]
    steep = estimated(f"{user} --step-ms 1:30,4:30,5:60,24:600", capsys)
    assert not steep["pays"]


@pytest.mark.parametrize("acceptance", [0.0, 0.001, 0.37, 0.5, 0.9, 0.999, 1.0])
def test_a_history_has_the_acceptance_that_was_asked_for(acceptance):
    history = outcomes([acceptance])
    assert history.count(HIT) / len(history) == pytest.approx(acceptance, abs=0.02)


def test_rates_by_the_accepted_tokens_before_make_runs_of_their_lengths(capsys):
    history = outcomes([0.4, 0.5, 0.8])
    runs = [len(run) for run in history.split(bytes([MISS]))[:-1]]
    shares = [sum(run >= n for run in runs) / len(runs) for n in (1, 2, 3, 4)]
    assert shares == pytest.approx([0.4, 0.2, 0.16, 0.128], abs=0.02)
    assert estimated(f"{NEAR} --acceptance 0.4,0.5,0.8", capsys)["acceptance_length"] == pytest.approx(2.36, abs=0.06)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--rtt-ms 5 --acceptance 0.5 --draft-ms 4", "the following arguments are required: --step-ms"),
        ("--step-ms 0 --rtt-ms 5 --acceptance 0.5 --draft-ms 4", "--step-ms: must be from 0.1 to 600000, got 0"),
        ("--step-ms 30 --rtt-ms nan --acceptance 0.5 --draft-ms 4", "--rtt-ms: must be from 0 to 60000, got nan"),
        ("--step-ms 30 --rtt-ms 5 --acceptance 70 --draft-ms 4", "--acceptance: must be from 0 to 1, got 70"),
        ("--step-ms 30 --rtt-ms 5 --acceptance 0.5,x --draft-ms 4", "--acceptance: must be RATE or RATE,RATE,..., got"),
        ("--step-ms 1:30,8 --rtt-ms 5 --acceptance 0.5 --draft-ms 4", "--step-ms: must be MS or TOKENS:MS,"),
        ("--step-ms 8:34,8:36 --rtt-ms 5 --acceptance 0.5 --draft-ms 4", "each number of tokens once, among them 1"),
        ("--step-ms 1:30,8:0 --rtt-ms 5 --acceptance 0.5 --draft-ms 4", "--step-ms: must be from 0.1 to 600000, got 0"),
        ("--step-ms 1:30,8:34 --rtt-ms 5 --acceptance 0.5 --draft-ms 4 --token-ms 1", "--token-ms is for one number"),
        ("--step-ms 30 --rtt-ms 5 --acceptance 0.5 --draft-ms 4 --users 0", "--users: must be from 1 to 1000, got 0"),
    ],
)
def test_a_figure_out_of_bounds_is_refused_with_the_bounds(arguments, said, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["estimate", *arguments.split()])
    assert ended.value.code == 2 and said in capsys.readouterr().err


def test_people_get_a_table_and_a_sentence(capsys):
    arguments = "--step-ms 30 --rtt-ms 70 --acceptance 0.7 --draft-ms 4 --users 16 --token-ms 1"
    with pytest.raises(SystemExit):
        main(["estimate", *arguments.split()])
    *rows, empty, summary = capsys.readouterr().out.splitlines()
    assert len(rows) == 8 and rows[5].startswith("70 ms") and not empty
    assert summary.startswith("It pays at 70 ms for 16 users: 1.")
