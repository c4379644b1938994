"""Test the benchmark of the control plane: what its last line holds, and what fails it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks import control_plane
from benchmarks.support.harness import Size

KEYS = (
    "sessions",
    "decision_age_p99_s",
    "ms_per_session_decision",
    "open_p99_ms",
    "redis_commands_per_report",
    "coordinator_cpu",
    "takeover_s",
    "lost",
)


@pytest.fixture
def _own_environment() -> Iterator[None]:
    """Restore this process's environment, in which the benchmark forgets other clusters' settings."""
    environment = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environment)


@pytest.mark.e2e
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("_own_environment")
async def test_the_smoke_size_opens_reports_kills_and_loses_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    await control_plane.main(["--smoke"])
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last.keys() == {*KEYS, "by_coordinators"}
    found = last["by_coordinators"]["2"]
    assert (last["sessions"], last["lost"]) == (32, 0)
    assert 0 < last["decision_age_p99_s"] < 30
    assert last["ms_per_session_decision"] > 0
    assert 0 < found["open_p50_ms"] <= last["open_p99_ms"]
    assert last["redis_commands_per_report"] > 5
    assert 0 < last["takeover_s"] < control_plane.TAKEOVER_TIMEOUT_S
    assert found["cores"].keys() == {"coordinators", "redis", "fake verifiers", "devices"}


def figures(**changes: Any) -> dict[str, Any]:
    good = dict(zip(KEYS, (10_000, 2.0, 0.05, 20.0, 40.0, 0.7, 2.0, 0), strict=True))
    return {**good, **changes}


def test_the_worst_number_of_coordinators_decides() -> None:
    one, two = figures(takeover_s=None, decision_age_p99_s=3.0), figures(open_p99_ms=40.0, lost=1)
    result = control_plane.result_of({1: one, 2: two})
    assert (result["decision_age_p99_s"], result["open_p99_ms"], result["takeover_s"]) == (3.0, 40.0, 2.0)
    assert result["lost"] == 1
    assert result["by_coordinators"] == {"1": one, "2": two}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("decision_age_p99_s", 4.1),
        ("decision_age_p99_s", None),
        ("ms_per_session_decision", 0.2),
        ("open_p99_ms", 51.0),
        ("takeover_s", 3.2),
        ("takeover_s", None),
        ("lost", 1),
    ],
)
def test_a_figure_beyond_its_bound_fails_a_run(name: str, value: float | None) -> None:
    def failing(**changes: Any) -> list[str]:
        result = control_plane.result_of({1: figures(takeover_s=None), 2: figures(**changes)})
        return [str(one) for one in control_plane.criteria(result) if one.fails(Size.FULL)]

    assert failing() == []
    assert len(failing(**{name: value})) == 1
