"""Run the cheapest benchmarks on as little as possible, so that what they share is known to work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from small_pair import PAIR

from benchmarks import latency, window
from benchmarks.support.harness import ROOT

pytestmark = pytest.mark.e2e


@pytest.fixture
def as_before() -> Iterator[None]:
    """Give this process its environment and its cores back."""
    environment, cores = dict(os.environ), os.sched_getaffinity(0)
    yield
    os.environ.clear()
    os.environ.update(environment)
    os.sched_setaffinity(0, cores)


def result_of(*command: str) -> dict[str, Any]:
    """Run a benchmark, and return the last line of its output."""
    ran = subprocess.run((sys.executable, "-m", *command), cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return result


@pytest.mark.nightly("`outrider demo` compares the same")
@pytest.mark.usefixtures("as_before")
def test_a_user_beside_the_verifier_gets_the_same_text_with_a_draft_and_in_fewer_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(latency, "QUICK", latency.Setting(rtts_ms=(0.0,), prompts=2, tokens=24))
    latency.main(["--quick", "--models", str(PAIR), "--out", str(tmp_path / "latency.json")])
    result = json.loads((tmp_path / "latency.json").read_text())
    assert result["prompts"]["asked"] == 3
    rows = result["table"]
    assert {row["sampling"] for row in rows} == {"greedy", "T=0.8"}
    assert all(row["token_ms"] > 0 and not row["differing"] for row in rows)
    assert {row["acceptance_length"] for row in rows if not row["drafts"]} == {1.0}
    assert max(row["acceptance_length"] for row in rows if row["drafts"]) > 1.0


@pytest.mark.nightly("it times two engines for a minute")
def test_the_engine_is_timed_with_its_share_outside_the_model() -> None:
    result = result_of("benchmarks.engine", "--quick", "--models", str(PAIR))
    assert all(0.0 < row["outside_ms"] < row["step_ms"] for row in result["table"])
    assert result["outside_ms_per_session_step"] > 0.0
    assert {row["engine"] for row in result["beside"]} == {"Outrider", "Hugging Face"}


def test_the_coordinators_lengths_come_near_the_bound_and_slow_no_session_down(tmp_path: Path) -> None:
    window.main(["--fleet", "--quick", "--out", str(tmp_path / "window.json")])
    result = json.loads((tmp_path / "window.json").read_text())
    coordinator = [row for row in result["table"] if row["lengths"] == "coordinator"]
    assert all(0.9 < row["of_the_bound"] <= 1.005 and row["slowest_session"] > 0.95 for row in coordinator)
