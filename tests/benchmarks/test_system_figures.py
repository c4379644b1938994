"""Test the arithmetic of benchmarks: figures that would be wrong without anybody noticing."""

from __future__ import annotations

import pytest

from benchmarks.constrained import follows, ordered
from benchmarks.control_plane import front_us
from benchmarks.failover import Request, Session, Trial
from benchmarks.overload import growth
from edge_agent.bench.users import Run, Text


def session(*delivered_s: float, begun_s: float = 0.0) -> Session:
    return Session(Request(0, (1,), {}), delivered_s=list(delivered_s), begun_s=begun_s)


def test_a_pause_is_the_longest_wait_that_ends_after_the_fault():
    assert session(1.0, 6.0, 7.0, 9.5).pause_s(6.5) == 2.5
    assert session(1.0, 6.0, 7.0).pause_s(5.0) == 5.0, "it was waiting when something broke"
    assert session(1.0, 2.0).pause_s(3.0) == 0.0
    assert session(8.0, begun_s=4.0).pause_s(5.0) == 4.0, "a wait for the first token counts"


def test_a_trial_has_the_longest_pause_of_its_sessions_and_no_first_token_of_a_refused_one():
    trial = Trial([session(1.0, 4.0), session(1.0, 2.0)], session(), broken_s=1.5)
    assert trial.pause_s == 3.0
    assert trial.new_session_s is None


def test_the_front_costs_what_it_took_while_all_users_generated_by_their_steps():
    def text(user: int, *delivered_s: float) -> Text:
        return Text(user, 0, (), 0.0, delivered_s, steps=0, evaluated=0, accepted=0)

    # The second user begins at 2 and ends at 8. Two tokens that come together are one step.
    run = Run((text(0, 1.0, 3.0, 3.0, 5.0, 7.0, 9.0), text(1, 2.0, 4.0, 6.0, 8.0)), busy=0.0)
    samples = [(0.0, 0.0), (2.0, 0.001), (7.5, 0.006), (10.0, 1.0)]
    assert front_us(run, samples) == pytest.approx(0.005 * 1e6 / 5)
    assert front_us(run, samples[:2]) is None


def test_memory_grows_by_the_slope_of_the_last_half_alone():
    hour = 3_600.0
    warming = [(second * 10.0, 100.0 + min(second, 30) * 2.0) for second in range(61)]
    assert growth(warming) == {"mb_per_hour": 0.0, "mb_per_hour_upper": 0.0}
    leaking = [(at, 5.0 * at / hour) for at, _ in warming]
    assert growth(leaking)["mb_per_hour"] == pytest.approx(5.0, abs=0.1)
    noisy = [(at, mb + (7.0 if number % 7 == 0 else 0.0)) for number, (at, mb) in enumerate(leaking)]
    found = growth(noisy)
    assert found["mb_per_hour_upper"] > found["mb_per_hour"]
    assert growth(leaking[:10]) == {"mb_per_hour": None, "mb_per_hour_upper": None}


def test_an_instance_is_written_in_the_order_of_its_schema():
    schema = {
        "properties": {"a": {"properties": {"c": {}, "d": {}}}, "b": {"items": {"properties": {"x": {}, "y": {}}}}}
    }
    written = ordered({"z": 0, "b": [{"y": 1, "x": 2}], "a": {"d": 2, "c": 3}}, schema)
    assert [list(written), list(written["a"]), list(written["b"][0])] == [["a", "b", "z"], ["c", "d"], ["x", "y"]]


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        ("object", '{"name": "A", "age": 1, "kind": "customer", "tags": []}', '{"name": "A", "age": 121}'),
        ("list", "[1, 2]", '["1"]'),
        ("regular expression", "one two three four five", "one"),
        ("choice", "positive", "positiv"),
    ],
)
def test_an_output_that_breaks_its_grammar_is_found(kind: str, right: str, wrong: str):
    assert follows(kind, right)
    assert not follows(kind, wrong)
    assert not follows(kind, "no")
