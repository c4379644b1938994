"""Test that a paced target computes the same logits, only later."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks.support.pace import COUNTS, Pace, PassCounts, hold
from benchmarks.support.paced_engine import pace_targets
from cloud_verifier.engine.torch_backend.batch import PackedBatch
from cloud_verifier.engine.torch_backend.model import TargetModel


def test_a_pass_takes_as_long_as_its_rows_ask_for() -> None:
    counts = PassCounts()
    begun = time.perf_counter()
    with hold(Pace(20.0, 1.0), counts, 30):
        pass
    assert 0.05 <= time.perf_counter() - begun < 0.2
    assert counts.overran == 0.0


def test_a_pass_that_took_longer_by_itself_is_counted_and_not_held_up() -> None:
    counts = PassCounts()
    for seconds in (0.05, 0.0, 0.0, 0.0):
        with hold(Pace(20.0), counts, 1):
            time.sleep(seconds)
    assert counts.overran == pytest.approx(0.25)
    counts.begin()
    with hold(Pace(20.0), counts, 1):
        pass
    assert counts.overran == 0.0


def test_a_pass_that_reads_a_prompt_is_paced_but_not_judged() -> None:
    counts = PassCounts()
    for seconds in (0.0, 0.03):
        begun = time.perf_counter()
        with hold(Pace(20.0), counts, 1, reads=True):
            time.sleep(seconds)
        assert time.perf_counter() - begun >= 0.02
    assert counts.overran == 0.0


def test_whoever_started_a_paced_verifier_reads_its_counts_from_a_file(tmp_path: Path) -> None:
    ours = PassCounts(tmp_path / "passes")
    theirs = PassCounts.of_environment({COUNTS: str(tmp_path / "passes")})
    theirs.add(overran=True)
    assert ours.overran == 1.0
    ours.begin()
    theirs.add(overran=True)
    theirs.add(overran=False)
    assert ours.overran == 0.5


def test_a_target_is_paced_once_it_has_passed_the_numerics_check(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, plan = torch.zeros(1, 2), Any
    monkeypatch.setattr(TargetModel, "forward", lambda model, batch, plan: logits)
    pace_targets(Pace(20.0), PassCounts())
    batch, target = PackedBatch.pack([]), SimpleNamespace(deviation=None)
    seconds = []
    for deviation in (None, 0.0):
        target.deviation = deviation
        begun = time.perf_counter()
        assert TargetModel.forward(target, batch, plan) is logits  # type: ignore[arg-type]
        seconds.append(time.perf_counter() - begun)
    assert seconds[0] < 0.02 <= seconds[1]
