"""Test the loop over fake stages: what begins a run, what ends it, and that a kill before any line loses nothing."""

from __future__ import annotations

import errno
import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from loop_fakes import World, card, killed_at, passage, write_stage

from cloud_verifier.distill import loop as loop_module
from cloud_verifier.distill import run_folder, state, watcher
from cloud_verifier.distill.errors import PermanentFailure, StageFailed, TooLittleTraffic
from cloud_verifier.distill.loop import DistillLoop
from cloud_verifier.distill.publishing import publisher
from cloud_verifier.distill.publishing.release_client import CANARY, CANDIDATE, ROLLED_BACK, STABLE
from cloud_verifier.distill.run_folder import Job
from cloud_verifier.distill.state import RunOutcome
from outrider.artifacts.store import file_digest
from outrider.core.errors import BadRequest, ModelRefused, Unavailable

STAGES = ["dataset", "training", "export", "gate"]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


async def until_idle(loop: DistillLoop, steps: int = 50) -> DistillLoop:
    """Take steps as long as there is something to do at once."""
    for _ in range(steps):
        if await loop.step() > 0:
            return loop
    raise AssertionError(f"still busy: {loop.state}")


def last(loop: DistillLoop) -> RunOutcome:
    return loop.state.history[-1]


async def test_enough_fresh_traffic_becomes_a_release_and_its_canary_is_awaited(world: World) -> None:
    world.traffic(1_000)
    loop = await until_idle(world.loop())
    assert world.stages.begun == STAGES
    assert loop.state.run is not None and loop.state.run.stage == "canary"
    assert world.releases.states == {1: CANARY}
    world.releases.decide_all(STABLE)
    await until_idle(loop)
    assert (loop.state.run, last(loop).result) == (None, "stable")
    assert world.releases.known[last(loop).release].manifest.parent == f"sha256:{file_digest(world.config.draft)}"


async def test_too_little_traffic_begins_nothing(world: World) -> None:
    world.traffic(999)
    loop = await until_idle(world.loop())
    assert (loop.state.run, world.stages.begun) == (None, [])


async def test_falling_acceptance_begins_a_run_for_that_class(world: World) -> None:
    release = file_digest(world.folder / "narrow.gguf")
    loop = world.loop()
    world.traffic(300, "code", 0.8, draft_release=release)
    await until_idle(loop)
    assert loop.state.usual == {"code": 0.8}
    world.traffic(250, "sums", 0.3, draft_release=f"sha256:{release}")
    await until_idle(loop)
    assert loop.state.run is not None
    assert "acceptance on class 'sums' is 0.30, usual is 0.80" in loop.state.run.cause
    assert loop.state.run.fresh == ("code", "sums")


async def test_an_alarm_waits_for_enough_to_learn_from_and_does_not_become_usual_meanwhile(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    world.settings = {"run_tokens": 400}
    release = file_digest(world.folder / "narrow.gguf")
    loop = world.loop()
    world.traffic(300, "code", 0.8, draft_release=release)
    await until_idle(loop)
    world.traffic(399, "sums", 0.3, draft_release=release)
    await until_idle(loop)
    assert (loop.state.run, loop.state.usual) == (None, {"code": 0.8})
    assert [line for line in caplog.messages if "begins once there are 400 tokens" in line] != []
    world.traffic(1, "sums", 0.3, draft_release=release)
    await until_idle(loop)
    assert loop.state.run is not None and "class 'sums'" in loop.state.run.cause


async def test_more_than_makes_a_run_due_in_any_case_is_not_waited_for(world: World) -> None:
    world.settings = {"run_tokens": 60_000}
    world.traffic(1_000)
    loop = await until_idle(world.loop())
    assert loop.state.run is not None


async def test_a_draft_that_failed_the_gate_is_not_trained_again_from_the_same_traffic(world: World) -> None:
    world.stages.passes = False
    world.traffic(1_000)
    loop = await until_idle(world.loop())
    assert (last(loop).result, last(loop).reason) == ("refused", "too weak")
    await until_idle(world.loop())
    assert world.stages.begun == STAGES and world.releases.versions == []
    world.traffic(1_000)
    await until_idle(world.loop())
    assert world.stages.begun == 2 * STAGES


async def test_a_release_that_was_rolled_back_ends_its_run_with_the_reason(world: World) -> None:
    world.traffic(1_000)
    loop = await until_idle(world.loop())
    assert loop.state.run is not None
    world.releases.decide(loop.state.run.release, ROLLED_BACK, "worse on class 'code'")
    await until_idle(loop)
    assert (last(loop).result, last(loop).reason) == ("rolled_back", "worse on class 'code'")


async def test_the_next_run_starts_from_the_stable_release_and_must_beat_it(world: World) -> None:
    world.traffic(1_000)
    loop = await until_idle(world.loop())
    world.releases.decide_all(STABLE)
    await until_idle(loop)
    first = last(loop).release
    world.traffic(1_000)
    await until_idle(loop)
    job = Job.read(world.folder / "state" / "runs" / "2")
    assert job.incumbent.name == f"{first}.gguf"
    assert job.base == world.folder / "state" / "runs" / "1" / "model", "its weights before they were quantised"
    assert world.releases.versions == [1, 2]


async def test_a_stage_that_fails_is_tried_again_later_and_each_time_later(world: World) -> None:
    world.stages.fails["training"] = [StageFailed("training: out of memory")] * 2
    world.traffic(1_000)
    loop = await until_idle(world.loop())
    assert world.stages.begun == ["dataset", "training"]
    assert loop.state.run is not None and loop.state.run.not_before_unix == world.now + 5
    world.now += 6
    await until_idle(loop)
    assert loop.state.run.not_before_unix == world.now + 10
    world.now += 11
    await until_idle(loop)
    assert loop.state.run.stage == "canary" and loop.state.run.failures == 0


async def test_a_stage_that_keeps_failing_is_given_up_with_its_traffic(world: World) -> None:
    world.settings["attempts"] = 3
    world.stages.fails["export"] = [StageFailed("export: no block fits")] * 9
    world.traffic(1_000)
    loop = world.loop()
    for _ in range(20):
        await loop.step()
        world.now += 100
    assert world.stages.begun.count("export") == 3
    assert (last(loop).result, loop.state.run) == ("failed", None)


async def test_what_would_fail_again_is_given_up_at_once(world: World) -> None:
    world.stages.fails["dataset"] = [PermanentFailure("dataset: nothing held out")]
    world.traffic(1_000)
    loop = await until_idle(world.loop())
    assert (last(loop).result, world.stages.begun) == ("failed", ["dataset"])


async def test_a_run_that_comes_too_early_to_be_judged_waits_for_more_traffic_and_uses_none_up(world: World) -> None:
    world.stages.fails["dataset"] = [TooLittleTraffic("dataset: 3 held-out sessions")]
    world.traffic(1_000)
    loop = await until_idle(world.loop())
    assert (loop.state.run, loop.state.history, loop.state.used_unix) == (None, (), 0.0)
    world.traffic(400)
    await until_idle(world.loop())
    assert world.stages.begun == ["dataset"]
    world.traffic(100)
    loop = await until_idle(world.loop())
    assert loop.state.run is not None and sum(one.tokens for one in loop.state.run.seen.values()) == 1_500


async def test_a_run_that_failed_changes_nothing_of_what_is_usual(world: World) -> None:
    release = file_digest(world.folder / "narrow.gguf")
    world.traffic(300, "code", 0.8, draft_release=release)
    loop = await until_idle(world.loop())
    world.stages.fails["dataset"] = [PermanentFailure("dataset: nothing held out")]
    world.traffic(250, "code", 0.3, draft_release=release)
    await until_idle(loop)
    assert last(loop).result == "failed" and loop.state.usual == {"code": 0.8}


async def test_a_trainer_that_ends_without_its_result_has_failed(world: World) -> None:
    world.traffic(1_000)
    loop = world.loop()

    async def forgetful(stage: str, folder: Path) -> None:
        if stage != "training":
            write_stage(stage, folder)

    world.stages.run = forgetful  # type: ignore[method-assign]
    await until_idle(loop)
    assert loop.state.run is not None and (loop.state.run.stage, loop.state.run.failures) == ("training", 1)


async def test_while_the_coordinator_is_away_nothing_counts_as_a_failure(world: World) -> None:
    world.traffic(1_000)
    loop = world.loop()
    await loop.step()
    world.releases.away = True
    await until_idle(loop)
    assert loop.state.run is not None and (loop.state.run.stage, loop.state.run.failures) == ("publish", 0)
    world.releases.away = False
    await until_idle(loop)
    assert world.releases.states == {1: CANARY}


async def test_a_coordinator_that_lost_its_data_gets_the_canary_again(world: World) -> None:
    world.traffic(1_000)
    loop = await until_idle(world.loop())
    world.releases.known.clear()
    await until_idle(loop)
    assert world.releases.states == {1: CANARY}
    world.releases.decide_all(STABLE)
    await until_idle(loop)
    world.releases.known.clear()
    await until_idle(world.loop())
    assert world.releases.states == {1: STABLE}


async def test_a_canary_whose_version_another_publisher_took_is_signed_anew(world: World) -> None:
    world.traffic(1_000)
    loop = await until_idle(world.loop())
    world.releases.known.clear()
    (world.folder / "other").mkdir()
    other = World(world.folder / "other", world.releases)
    for content in (b"GGUF a", b"GGUF b"):
        (other.folder / "draft.gguf").write_bytes(content)
        await other.publisher().publish(other.folder / "draft.gguf", "Q8_0")
    for _ in range(4):
        await loop.step()
    assert loop.state.run is not None
    assert world.releases.known[loop.state.run.release].manifest.version == 3


async def test_the_days_budget_holds_back_the_next_run(world: World) -> None:
    world.settings["daily_minutes"] = 1.0
    loop = world.loop()

    async def slow(stage: str, folder: Path) -> None:
        world.now += 20
        write_stage(stage, folder)

    world.stages.run = slow  # type: ignore[method-assign]
    world.traffic(1_000)
    await until_idle(loop)
    world.releases.decide_all(STABLE)
    world.traffic(1_000)
    await until_idle(loop)
    assert loop.state.last == 1 and loop.state.run is None
    world.now += 86_400
    await until_idle(loop)
    assert loop.state.last == 2


async def test_a_dataset_goes_with_its_run_and_old_runs_go_in_time(world: World) -> None:
    world.settings["keep_runs"] = 2
    loop = world.loop()
    for number in range(1, 6):
        world.traffic(1_000)
        await until_idle(loop)
        world.releases.decide_all(STABLE if number == 1 else ROLLED_BACK)
        await until_idle(loop)
    runs = world.folder / "state" / "runs"
    assert sorted(int(folder.name) for folder in runs.iterdir()) == [1, 4, 5], "the first is what is stable"
    assert not list(runs.glob("*/dataset"))


@pytest.mark.parametrize("stage", ["training", "gate"])
async def test_a_dataset_that_would_expire_before_the_stage_ends_is_built_again(world: World, stage: str) -> None:
    world.stages.fails[stage] = [StageFailed(f"{stage}: the machine went down")]
    world.traffic(1_000)
    loop = await until_idle(world.loop())
    path = world.folder / "state" / "runs" / "1" / "dataset" / "card.json"
    path.write_text(card(world.now + 60))
    world.now += 6
    await until_idle(loop)
    assert loop.state.run is not None and loop.state.run.stage == "canary"
    before = STAGES[: STAGES.index(stage) + 1]
    assert world.stages.begun == [*before, "dataset", *(["training"] if stage == "training" else []), "export", "gate"]


async def test_what_has_expired_is_deleted_while_something_is_waited_for(world: World) -> None:
    world.stages.fails["export"] = [StageFailed("export: the disk is full")]
    world.traffic(1_000)
    loop = await until_idle(world.loop())
    path = world.folder / "state" / "runs" / "1" / "dataset" / "card.json"
    path.write_text(card(world.now + 1))
    world.now += 2
    await loop.step()
    assert not path.exists() and loop.state.run is not None and loop.state.run.stage == "export"


async def test_a_dataset_is_asked_to_last_for_its_run(world: World) -> None:
    world.traffic(1_000)
    await world.loop().step()
    job = Job.read(world.folder / "state" / "runs" / "1")
    assert job.dataset["lasts_s"] > 60 * (world.config.train_minutes + 3 * world.config.stage_minutes)


@pytest.mark.parametrize("error", [BadRequest("no such publisher"), ModelRefused("of another vocabulary")])
async def test_a_draft_that_the_coordinator_refuses_is_given_up_in_time(world: World, error: Exception) -> None:
    async def refused(raw: bytes) -> str:
        raise error

    world.releases.publish = refused  # type: ignore[method-assign]
    world.traffic(1_000)
    loop = world.loop()
    for _ in range(40):
        await loop.step()
        world.now += 4_000
    assert loop.state.run is None and (last(loop).result, last(loop).reason) == ("failed", str(error))


async def test_a_candidate_behind_a_pinned_release_is_not_waited_for(world: World) -> None:
    world.traffic(1_000)
    loop = await until_idle(world.loop())
    world.releases.decide_all(STABLE)
    await until_idle(loop)
    world.traffic(1_000)
    await until_idle(loop)
    assert loop.state.run is not None
    world.releases.pin(last(loop).release)
    world.releases.decide(loop.state.run.release, CANDIDATE)
    await until_idle(loop)
    assert (loop.state.run, last(loop).result) == (None, "waiting") and "pinned" in last(loop).reason


async def test_a_verifier_whose_clock_is_ahead_hides_no_traffic_and_counts_in_its_time(world: World) -> None:
    world.traffic(1_000)
    world.log.passages.append(passage("ahead", 1_000, "sums", world.now + 86_400))
    loop = await until_idle(world.loop())
    world.releases.decide_all(STABLE)
    await until_idle(loop)
    assert loop.state.used_unix <= world.now
    world.traffic(1_000)
    await until_idle(loop)
    assert loop.state.last == 2
    world.releases.decide_all(ROLLED_BACK)
    await until_idle(loop)
    assert loop.state.last == 2
    world.now += 86_400
    await until_idle(loop)
    assert loop.state.last == 3


async def test_an_unexpected_error_does_not_end_the_loop(world: World) -> None:
    def torn(since_unix: float = 0.0, now: float | None = None) -> Iterator[Any]:
        raise ValueError("no Parquet footer")

    world.log.read, original = torn, world.log.read  # type: ignore[method-assign]
    loop = world.loop()
    assert await loop.step() > 0
    world.log.read = original  # type: ignore[method-assign]
    (world.folder / "state" / "runs" / "lost+found").mkdir(parents=True)
    world.traffic(1_000)
    world.stages.passes = False
    await until_idle(loop)
    assert last(loop).result == "refused"
    assert (world.folder / "state" / "runs" / "lost+found").exists()


async def test_a_full_disk_does_not_end_the_loop(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    world.traffic(1_000)
    loop = world.loop()
    with monkeypatch.context() as patched:
        patched.setattr(state.LoopState, "save", full)
        assert await loop.step() > 0
        assert (loop.state.run, loop.failures) == (None, 1)
    await until_idle(loop)
    assert world.stages.begun == STAGES


@pytest.mark.parametrize("decided", [False, True])
async def test_a_draft_of_another_target_is_never_signed_for_the_one_that_is_served(
    world: World, decided: bool
) -> None:
    world.traffic(1_000)
    loop = world.loop()
    if decided:
        await until_idle(loop)
    else:
        await loop.step()
    signed = len(world.releases.published)
    world.target = replace(world.target, tokenizer_hash="sha256:others")
    loop = await until_idle(world.loop())
    assert (loop.state.run, last(loop).result) == (None, "failed") and "target" in last(loop).reason
    assert len(world.releases.published) == signed


async def test_a_release_states_the_quantization_that_its_run_began_with(world: World) -> None:
    world.traffic(1_000)
    await world.loop().step()
    world.settings["quantization"] = "F16"
    await until_idle(world.loop())
    (known,) = world.releases.known.values()
    assert known.manifest.quantization == "Q8_0"


async def test_the_traffic_log_is_tidied_now_and_then(world: World) -> None:
    loop = world.loop()
    for _ in range(3):
        await loop.step()
    assert world.log.tidied == 1
    world.now += world.config.housekeeping_s
    await loop.step()
    assert world.log.tidied == 2


async def test_once_goes_as_far_as_the_canary_and_next_time_returns_its_outcome(world: World) -> None:
    assert await world.loop().once() is None
    world.traffic(1_000)
    assert await world.loop().once() is None
    assert world.releases.states == {1: CANARY}
    assert await world.loop().once() is None
    world.releases.decide_all(STABLE)
    outcome = await world.loop().once()
    assert outcome is not None and outcome.result == "stable"


async def test_once_reports_a_refusal_and_failures(world: World) -> None:
    world.traffic(1_000)
    world.stages.fails["training"] = [StageFailed("training: out of memory")]
    with pytest.raises(StageFailed, match="out of memory"):
        await world.loop().once()
    world.stages.passes = False
    outcome = await world.loop().once()
    assert outcome is not None and outcome.result == "refused"
    world.releases.away = True
    with pytest.raises(Unavailable):
        await world.loop().once()


async def test_a_changed_setting_does_not_disturb_a_run_that_has_begun(world: World) -> None:
    world.traffic(1_000)
    loop = world.loop()
    await loop.step()
    plan = json.loads((world.folder / "state" / "runs" / "1" / "plan.json").read_text())
    assert plan["minutes"] == 30.0 and plan["dataset"].endswith("runs/1/dataset")
    world.settings["training_options"] = {"steps": 7}
    await until_idle(world.loop())
    assert json.loads((world.folder / "state" / "runs" / "1" / "plan.json").read_text()) == plan
    world.releases.decide_all(STABLE)
    world.traffic(1_000)
    await until_idle(world.loop())
    later = json.loads((world.folder / "state" / "runs" / "2" / "plan.json").read_text())
    assert later["steps"] == 7 and "minutes" not in later


def test_a_damaged_state_is_reported(world: World) -> None:
    (world.folder / "state").mkdir()
    (world.folder / "state" / "state.json").write_text("{")
    with pytest.raises(BadRequest, match=r"state\.json"):
        world.loop()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files that a kill left open
def test_wherever_it_is_killed_it_publishes_exactly_one_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.fsync", lambda _: None)  # no power is lost here

    async def whole(world: World) -> RunOutcome:
        """Go from fresh traffic to a stable release."""
        loop = world.loop()
        while not loop.state.history:
            await loop.step()
            world.now += 10
            world.releases.decide_all(STABLE)
        for _ in range(3):
            await loop.step()
        return last(loop)

    line = 0
    while True:
        folder = tmp_path / str(line)
        folder.mkdir()
        world = World(folder)
        world.traffic(1_000)
        ended = killed_at(line, (loop_module, watcher, run_folder, state, publisher), lambda world=world: whole(world))
        again = killed_at(1_000_000, (), lambda world=world: whole(world))
        assert again is not None and again.result == "stable", f"killed before line {line}"
        assert world.releases.versions == [1], f"killed before line {line}"
        assert world.releases.states == {1: STABLE}
        if ended is not None:
            break
        line += 3
    assert line > 200
    gc.collect()  # files that killed runs left open are reported here, not in a later test
