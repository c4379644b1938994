"""Test that a device's metrics are the sums of its requests' statistics."""

from __future__ import annotations

import contextlib

import pytest

from edge_agent.metrics import EdgeMetrics
from edge_agent.session.statistics import Statistics
from outrider.core.errors import Overloaded


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def ended() -> str:
    return "stop"


def samples(metrics: EdgeMetrics) -> dict[str, float]:
    lines = [line.rpartition(" ") for line in metrics.render().decode().splitlines() if not line.startswith("#")]
    return {name.removeprefix("outrider_edge_"): float(value) for name, _, value in lines}


def test_a_request_counts_while_it_runs_and_not_twice_when_it_has_ended(clock) -> None:
    metrics, statistics = EdgeMetrics(), Statistics(clock)
    with metrics.following(statistics, lambda: "length"):
        statistics.delivered(3, accepted=2)
        statistics.drafted += 5
        during = samples(metrics)
    after = samples(metrics)
    for name, value in (
        ('tokens_total{rule="coupled"}', 3),
        ('tokens_total{rule="typical"}', 0),
        ('spec_decode_num_accepted_tokens_total{rule="coupled"}', 2),
        ("spec_decode_num_draft_tokens_total", 5),
    ):
        assert (during[name], after[name]) == (value, value)
    assert (during["requests_running"], after["requests_running"]) == (1, 0)
    assert after['requests_total{finish="length"}'] == 1


def test_tokens_of_a_lossy_request_are_counted_apart(clock) -> None:
    metrics, statistics = EdgeMetrics(), Statistics(clock)
    statistics.rule = "typical"
    with metrics.following(statistics, lambda: "length"):
        statistics.delivered(4, accepted=3)
    found = samples(metrics)
    assert (found['tokens_total{rule="typical"}'], found['tokens_total{rule="coupled"}']) == (4, 0)
    assert found['spec_decode_num_accepted_tokens_total{rule="typical"}'] == 3
    assert "lossy, by the acceptance rule typical" in statistics.summary()


def test_times_are_those_of_requests_that_have_ended(clock) -> None:
    metrics, statistics = EdgeMetrics(), Statistics(clock)
    with metrics.following(statistics, ended):
        clock.now = 0.2
        statistics.delivered(1, accepted=0)
        clock.now = 1.2
        statistics.delivered(4, accepted=3)
        statistics.rtt_ms = 40.0
        assert samples(metrics)["time_to_first_token_seconds_count"] == 0
    after = samples(metrics)
    assert after["time_to_first_token_seconds_sum"] == pytest.approx(0.2)
    assert after["time_per_output_token_seconds_sum"] == pytest.approx(0.25)
    assert after["request_seconds_sum"] == pytest.approx(1.2)
    assert after["rtt_seconds_sum"] == pytest.approx(0.04)


def test_a_request_that_fails_is_counted_by_its_error_and_one_that_ends_by_its_reason(clock) -> None:
    metrics = EdgeMetrics()
    for error in (Overloaded("full"), ValueError("a defect")):
        with contextlib.suppress(type(error)), metrics.following(Statistics(clock), ended):
            raise error
    with metrics.following(Statistics(clock), ended):
        pass
    found = samples(metrics)
    for finish in ("Overloaded", "InternalError", "stop"):
        assert found[f'requests_total{{finish="{finish}"}}'] == 1
