"""Test how the loop's state changes: the next stage, what a failure leads to, and what ends a canary."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
from loop_fakes import SIGNER, TARGET, World

from cloud_verifier.distill.config import DistillConfig
from cloud_verifier.distill.data.traffic_counts import ClassTraffic
from cloud_verifier.distill.errors import PermanentFailure, StageFailed, TooLittleTraffic
from cloud_verifier.distill.loop import canary_result
from cloud_verifier.distill.publishing.release_client import (
    CANARY,
    CANDIDATE,
    ROLLED_BACK,
    STABLE,
    SUPERSEDED,
    ReleaseRecord,
)
from cloud_verifier.distill.state import DAY_S, LoopState, RunState, Stage
from outrider.core.errors import BadRequest
from outrider.wire.manifest import Manifest, sign


@pytest.fixture
def config(tmp_path: Path) -> DistillConfig:
    return World(tmp_path, settings={"attempts": 3}).config


def running(stage: Stage, failures: int = 0) -> tuple[LoopState, RunState]:
    run = RunState(
        number=4,
        cause="1000 fresh tokens",
        fresh=("sums",),
        incumbent="ab" * 32,
        newest_unix=70.0,
        seen={"sums": ClassTraffic(tokens=1_000, judged=1_000, guessed=600)},
        stage=stage,
        failures=failures,
    )
    return LoopState(run=run, last=4, used_unix=50.0, usual={"sums": 0.8}), run


def test_a_run_passes_through_every_stage_in_order_and_forgets_its_failures() -> None:
    state, run = running("dataset", failures=2)
    stages = [run.stage]
    while run.stage != "canary":
        state = state.advanced(run)
        assert state.run is not None and (state.run.failures, state.run.not_before_unix) == (0, 0.0)
        run = state.run
        stages.append(run.stage)
    assert tuple(stages) == get_args(Stage)


def test_a_failed_stage_waits_twice_as_long_each_time_and_the_last_attempt_ends_the_run(config: DistillConfig) -> None:
    state, run = running("export")
    waits = []
    for _ in range(config.attempts - 1):
        state = state.failed(run, StageFailed("export: no disk"), 100.0, config)
        assert state.run is not None
        run = state.run
        waits.append(run.not_before_unix - 100.0)
    assert waits == [config.retry_s, 2 * config.retry_s]
    state = state.failed(run, StageFailed("export: no disk"), 100.0, config)
    assert (state.run, state.history[-1].result, state.used_unix) == (None, "failed", 70.0)
    assert state.usual == {"sums": 0.8}, "a run that failed has no part in what is usual"


def test_a_permanent_failure_ends_the_run_at_once(config: DistillConfig) -> None:
    state, run = running("export")
    state = state.failed(run, PermanentFailure("export: no block fits"), 1.0, config)
    assert state.run is None and state.history[-1].reason == "export: no block fits"


def test_a_run_that_came_too_early_uses_up_no_traffic(config: DistillConfig) -> None:
    state, run = running("dataset")
    state = state.failed(run, TooLittleTraffic("dataset: 3 sessions"), 1.0, config)
    assert (state.run, state.used_unix, state.wanted, state.history) == (None, 50.0, 1_500, ())


@pytest.mark.parametrize("stage", ["publish", "canary"])
def test_a_draft_that_passed_the_gate_is_given_up_only_for_errors_of_its_own(
    stage: Stage, config: DistillConfig
) -> None:
    state, run = running(stage, failures=9)
    assert state.failed(run, OSError("the file system is away"), 1.0, config).run is not None
    assert state.failed(run, BadRequest("no such publisher"), 1.0, config).run is None


def test_a_run_that_did_not_fail_moves_what_is_usual_halfway_to_the_present(config: DistillConfig) -> None:
    state, run = running("gate")
    state = state.ended(run, "refused", "too weak", 1.0, config)
    assert state.usual == {"sums": pytest.approx(0.7)}


def test_stages_of_more_than_a_day_ago_count_no_more() -> None:
    state = LoopState().with_stage_time(20.0, now=1_000.0)
    state = state.with_stage_time(30.0, now=2_000.0)
    assert state.spent_s(now=2_000.0) == 50.0
    assert state.spent_s(now=1_500.0 + DAY_S) == 30.0
    assert len(state.with_stage_time(1.0, now=1_500.0 + DAY_S).spent) == 2


def release(version: int, state: str, *, pinned: bool = False) -> ReleaseRecord:
    manifest = Manifest(version, TARGET.weights_hash, TARGET.tokenizer_hash, f"sha256:{version:064x}", 5, "Q8_0")
    return ReleaseRecord(manifest, sign(manifest, SIGNER), state, "as measured", pinned)


@pytest.mark.parametrize(
    ("state", "pinned", "stable_pinned", "result"),
    [
        (CANARY, False, False, None),
        (CANDIDATE, False, False, None),
        (STABLE, False, False, "stable"),
        (SUPERSEDED, False, False, "stable"),
        (ROLLED_BACK, False, False, "rolled_back"),
        (CANARY, True, False, "waiting"),
        (CANDIDATE, False, True, "waiting"),
        (CANARY, False, True, None),
    ],
)
def test_a_canary_is_over_once_it_is_decided_or_an_operator_holds_it(
    state: str, pinned: bool, stable_pinned: bool, result: str | None
) -> None:
    ours, stable = release(2, state, pinned=pinned), replace(release(1, STABLE), pinned=stable_pinned)
    found = canary_result({one.digest: one for one in (ours, stable)}, ours.digest)
    assert (found and found[0]) == result
