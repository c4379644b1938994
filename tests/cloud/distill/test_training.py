"""Test the training command: it learns, survives kills, and gives the same with one rank or two."""

from __future__ import annotations

import itertools
import json
import logging
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_drafts import random_text, tiny_draft, tiny_plan, tiny_tokenizer
from transformers import AutoModelForCausalLM

from cloud_verifier.distill.errors import PermanentFailure
from cloud_verifier.distill.gguf.writer import write_gguf
from cloud_verifier.distill.training import run as training
from cloud_verifier.distill.training.batches import BatchSampler, TrainingBatch, micro_batches
from cloud_verifier.distill.training.checkpoint import BEST, STATE, TrainingProgress
from cloud_verifier.distill.training.plan import TrainingPlan
from cloud_verifier.distill.training.ranks import Ranks
from cloud_verifier.distill.training.student import Student, load_base
from cloud_verifier.distill.training.trainer import DraftTrainer, evaluate, mean_overlap, sample

TIMEOUT_S = 100


def curve(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "curve.jsonl").read_text().splitlines()]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in curve(run) if "loss" in line]


def trained(root: Path, name: str = "run", **changes: Any) -> Path:
    """Run a training to its end; return its folder."""
    tiny_plan(root, **changes).write(root / name)
    assert training.train(root / name) == 0
    return root / name


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("loss", ["kl", "tv", "hybrid"])
def test_a_draft_comes_nearer_to_the_target_on_text_it_never_saw(loss: str, tmp_path: Path) -> None:
    run = trained(tmp_path, loss=loss, kl_share=0.3, steps=40, measure_steps=20, learning_rate=1e-2)
    done = json.loads((run / "done.json").read_text())
    assert done["validation_overlap"]["best"] > done["validation_overlap"]["before"] + 0.1
    assert losses(run)[-1] < losses(run)[0]
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    assert model.config.model_type == "qwen3" and (run / "model" / "tokenizer.json").exists()


def test_a_gguf_draft_is_trained_as_its_own_weights_would_be(tmp_path: Path) -> None:
    base = tiny_plan(tmp_path).base
    write_gguf(tiny_draft("qwen3"), tiny_tokenizer(), tmp_path / "base.gguf", "base")
    from_folder = trained(tmp_path, "folder", steps=4)
    from_file = trained(tmp_path, "file", base=tmp_path / "base.gguf", tokenizer=base, steps=4)
    assert losses(from_file) == losses(from_folder)


def test_the_curve_has_losses_overlaps_and_measurements_of_each_class(tmp_path: Path) -> None:
    lines = curve(trained(tmp_path))
    measured = [line for line in lines if line["validation_overlap"] is not None]
    assert [line["step"] for line in measured] == [0, 4, 8, 12]
    assert set(measured[0]["validation"]) == {"code", "prose"}
    mean = np.mean([one["overlap"] for one in measured[0]["validation"].values()])
    assert measured[0]["validation_overlap"] == pytest.approx(mean)
    steps = [line for line in lines if line["validation_overlap"] is None]
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert all(0 <= line["overlap"] <= 1 and line["loss"] > 0 and line["seconds"] > 0 for line in steps)


def test_the_best_weights_are_kept_and_not_the_last(tmp_path: Path) -> None:
    good = trained(tmp_path, "good", learning_rate=1e-2, steps=40)
    # A rate at which nothing better can come of it.
    run = trained(tmp_path, base=good / "model", learning_rate=3.0, gradient_norm=1e9, steps=8)
    done = json.loads((run / "done.json").read_text())
    assert done["best_step"] == 0 and done["validation_overlap"]["best"] == done["validation_overlap"]["before"]
    assert equal(weights(run), weights(good))


def test_a_loss_that_is_no_number_stops_the_run_with_advice(tmp_path: Path) -> None:
    plan = tiny_plan(tmp_path)
    broken = AutoModelForCausalLM.from_pretrained(plan.base)
    with torch.no_grad():
        broken.model.norm.weight.fill_(float("inf"))
    broken.save_pretrained(plan.base)
    plan.write(tmp_path / "run")
    with pytest.raises(PermanentFailure, match="lower learning rate"):
        training.train(tmp_path / "run")


def stopped_at(run: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run until the curve is at `step`, then send SIGTERM."""
    original = training.DraftTrainer._step

    def stepping(trainer: Any, *how: Any) -> None:
        original(trainer, *how)
        if trainer.progress.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(training.DraftTrainer, "_step", stepping)
        return training.train(run)


@pytest.mark.parametrize(
    ("precision", "cpu", "dtype"),
    [
        ("auto", "AVX512", torch.bfloat16),
        ("auto", "SVE256", torch.bfloat16),
        ("auto", "AVX2", torch.float32),
        ("auto", "DEFAULT", torch.float32),
        ("bfloat16", "AVX2", torch.bfloat16),
        ("float32", "AVX512", torch.float32),
    ],
)
def test_only_a_cpu_that_computes_with_bfloat16_trains_with_it_unless_the_plan_says_so(
    precision: Any, cpu: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: cpu)
    assert Ranks("cpu").dtype(precision) == dtype


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 4, "loss": "kl"}, {"precision": "bfloat16"}])
def test_a_run_that_was_stopped_gives_the_bits_of_one_that_was_not(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained(tmp_path, "whole", **changes)
    tiny_plan(tmp_path, **changes).write(tmp_path / "halves")
    assert stopped_at(tmp_path / "halves", 3, monkeypatch) == 143
    assert not (tmp_path / "halves" / "done.json").exists()
    assert stopped_at(tmp_path / "halves", 9, monkeypatch) == 143
    assert training.train(tmp_path / "halves") == 0
    assert losses(tmp_path / "halves") == losses(whole)
    assert equal(weights(tmp_path / "halves"), weights(whole))


def command(run: Path, *launch: str, **environment: str) -> subprocess.Popen[str]:
    settings = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": os.getcwd()}
    return subprocess.Popen(
        [sys.executable, *launch, "-m", "cloud_verifier.distill.training.run", str(run)],
        env=os.environ | settings | environment,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_step(run: Path, step: int) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        if (run / "curve.jsonl").exists() and any(line["step"] >= step for line in curve_so_far(run)):
            return
        time.sleep(0.01)
    raise TimeoutError(f"the run in {run} did not come to step {step}")


def curve_so_far(run: Path) -> list[dict[str, Any]]:
    lines = (run / "curve.jsonl").read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def test_a_killed_run_goes_on_from_its_checkpoint_to_the_same_bits(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"steps": 150, "save_seconds": 0.0, "measure_steps": 50}
    tiny_plan(tmp_path, **changes).write(tmp_path / "killed")
    process = command(tmp_path / "killed")
    wait_for_step(tmp_path / "killed", 5)
    process.kill()
    process.communicate()
    assert not (tmp_path / "killed" / "done.json").exists()
    again = command(tmp_path / "killed")
    _, said = again.communicate(timeout=TIMEOUT_S)
    assert again.returncode == 0, said
    assert "going on from step" in said
    whole = trained(tmp_path, "whole", **changes)
    assert losses(tmp_path / "killed") == losses(whole)
    assert equal(weights(tmp_path / "killed"), weights(whole))


def test_sigterm_saves_and_exits_143(tmp_path: Path) -> None:
    tiny_plan(tmp_path, steps=100_000, save_seconds=1e6).write(tmp_path / "run")
    process = command(tmp_path / "run")
    wait_for_step(tmp_path / "run", 3)
    process.terminate()
    _, said = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 143, said
    assert "saved at step" in said
    assert (tmp_path / "run" / "checkpoint" / "state.safetensors").exists()
    assert {path.suffix for path in (tmp_path / "run").rglob("*") if path.is_file()} <= {
        ".safetensors",
        ".json",
        ".jsonl",
    }


def test_a_torn_last_line_of_the_curve_is_dropped_on_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_plan(tmp_path).write(tmp_path / "run")
    stopped_at(tmp_path / "run", 6, monkeypatch)
    with (tmp_path / "run" / "curve.jsonl").open("a") as file:
        file.write('{"step": 7, "loss": 1.0}\n{"step": 8, "validation": {"code": {}')
    assert training.train(tmp_path / "run") == 0
    assert [line["step"] for line in curve(tmp_path / "run") if "loss" in line] == list(range(1, 13))


def test_a_checkpoint_of_another_plan_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_plan(tmp_path).write(tmp_path / "run")
    stopped_at(tmp_path / "run", 2, monkeypatch)
    tiny_plan(tmp_path, learning_rate=1e-4).write(tmp_path / "run")
    with pytest.raises(PermanentFailure, match="another plan"):
        training.train(tmp_path / "run")


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    run = trained(tmp_path, steps=2)
    before = (run / "curve.jsonl").read_text()
    assert training.train(run) == 0
    assert (run / "curve.jsonl").read_text() == before


def test_a_plan_that_cannot_be_read_fails_with_the_reason(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "plan.json").write_text('{"base": "x", "tokenizer": "x", "dataset": "x"}')
    monkeypatch.setattr(sys, "argv", ["run", str(tmp_path)])
    caplog.set_level(logging.WARNING)  # restored at the end, whatever main() sets
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as in a process of its own
    with pytest.raises(SystemExit) as ended:
        training.main()
    logged = capsys.readouterr().err
    assert ended.value.code == 3 and "give either steps or minutes" in logged and "Traceback" not in logged


def test_low_rank_training_leaves_the_base_and_writes_an_adapter_and_the_sum(tmp_path: Path) -> None:
    run = trained(tmp_path, lora_rank=4, steps=30, learning_rate=1e-2)
    adapter = load_file(run / "adapter" / "adapter_model.safetensors")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    name = "model.layers.1.mlp.up_proj"
    a, b = (adapter[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
    assert a.shape == (4, 64) and b.abs().max() > 0
    after = weights(run)
    torch.testing.assert_close(after[f"{name}.weight"], base[f"{name}.weight"] + 2.0 * b @ a, atol=1e-5, rtol=1e-4)
    assert torch.equal(after["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    done = json.loads((run / "done.json").read_text())
    assert done["validation_overlap"]["best"] > done["validation_overlap"]["before"] and done["adapter"] == "adapter"


RANKS = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 4}])
def test_two_ranks_learn_what_one_learns(changes: dict[str, Any], tmp_path: Path) -> None:
    one = trained(tmp_path, "one", **changes)
    tiny_plan(tmp_path, **changes).write(tmp_path / "two")
    process = command(tmp_path / "two", *RANKS)
    _, said = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, said
    # Sums are taken in another order: float32 agrees to about 1e-6 a step, and grows apart slowly.
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(one), rtol=1e-4)
    for name, tensor in weights(one).items():
        torch.testing.assert_close(weights(tmp_path / "two")[name], tensor, atol=2e-3, rtol=2e-3, msg=name)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ranks live on until they miss each other")
def test_ranks_end_with_a_torchrun_that_is_killed(tmp_path: Path) -> None:
    tiny_plan(tmp_path, steps=100_000, report_steps=1).write(tmp_path / "run")
    process = command(tmp_path / "run", *RANKS)
    wait_for_step(tmp_path / "run", 2)
    ranks = children_of(process.pid)
    process.kill()
    process.communicate(timeout=TIMEOUT_S)
    deadline = time.monotonic() + 10.0
    while any(alive(rank) for rank in ranks) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(ranks) == 2
    assert not any(alive(rank) for rank in ranks)


def children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_one_rank_goes_on_from_what_two_have_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes: dict[str, Any] = {"steps": 60, "save_seconds": 0.0, "measure_steps": 30}
    tiny_plan(tmp_path, **changes).write(tmp_path / "run")
    process = command(tmp_path / "run", *RANKS)
    wait_for_step(tmp_path / "run", 5)
    process.terminate()
    process.communicate(timeout=TIMEOUT_S)
    assert process.returncode != 0 and not (tmp_path / "run" / "done.json").exists()
    assert training.train(tmp_path / "run") == 0
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(trained(tmp_path, "one", **changes)), rtol=1e-3)


def test_embeddings_and_output_learn_at_a_rate_of_its_own(tmp_path: Path) -> None:
    still = weights(trained(tmp_path, "still", token_rate_share=0.0))
    slow = weights(trained(tmp_path, "slow", token_rate_share=0.1))
    fast = weights(trained(tmp_path, "fast", token_rate_share=1.0))
    name = "model.embed_tokens.weight"
    moved = [(one[name] - still[name]).abs().mean().item() for one in (slow, fast)]
    assert 0 < moved[0] < moved[1] / 3
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    assert torch.equal(still[name], base[name])
    assert not torch.equal(still["model.layers.0.mlp.up_proj.weight"], base["model.layers.0.mlp.up_proj.weight"])


def test_the_result_is_a_mean_of_what_was_learnt_and_what_was_known(tmp_path: Path) -> None:
    whole, mixed = (weights(trained(tmp_path, f"run-{share}", base_share=share)) for share in (0.0, 0.25))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    for name, tensor in mixed.items():
        torch.testing.assert_close(tensor, 0.75 * whole[name] + 0.25 * base[name], msg=name)
    assert not equal(mixed, whole)


def test_one_killed_between_its_best_weights_and_its_state_knows_how_good_they_are(tmp_path: Path) -> None:
    """With a length in minutes, a resumed training may not reach that step again."""
    run = trained(tmp_path)
    best = safe_open(run / "checkpoint" / BEST, framework="pt").metadata()["progress"]
    state = run / "checkpoint" / STATE
    behind = asdict(TrainingProgress(**json.loads(best))) | {"best_step": 0, "best_overlap": 0.01}
    save_file(load_file(state), state, metadata={"progress": json.dumps(behind)})
    (run / "done.json").unlink()
    plan = TrainingPlan.read(run)
    trainer = DraftTrainer(run, plan, Student(load_base(plan.base)), Ranks("cpu"))
    assert trainer.progress.best_overlap == json.loads(best)["best_overlap"] > 0.01
    assert trainer.progress.best_step == json.loads(best)["best_step"]


def test_what_was_measured_before_a_kill_that_came_before_any_save_stands_once(tmp_path: Path) -> None:
    run = trained(tmp_path, "killed", save_seconds=60.0)
    (run / "done.json").unlink()
    (run / "checkpoint" / STATE).unlink()
    assert training.train(run) == 0
    assert [line["step"] for line in curve(run)].count(0) == 1


# --- batches, schedule, measurement


def test_every_text_comes_once_an_epoch_and_every_step_has_some() -> None:
    rng = np.random.default_rng(0)
    texts = [random_text(rng, count) for count in (4, 90, 5, 5, 30, 6, 7, 8, 60, 12)]
    sampler = BatchSampler(texts, batch_tokens=40, seed=3)
    for epoch in range(5):
        steps = [sampler.batch(epoch * sampler.batches + number) for number in range(sampler.batches)]
        assert sorted(itertools.chain(*steps)) == list(range(10))
        assert all(steps)
    assert sampler.batch(2) == BatchSampler(texts, batch_tokens=40, seed=3).batch(2)
    assert [sampler.batch(i) for i in range(9)] != [BatchSampler(texts, 40, seed=4).batch(i) for i in range(9)]


def test_micro_batches_hold_the_batch_within_the_width() -> None:
    texts = [random_text(np.random.default_rng(0), count) for count in (4, 90, 5, 5, 30, 6)]
    groups = micro_batches(texts, [5, 0, 1, 3, 2, 4], max_tokens=40)
    assert sorted(itertools.chain(*groups)) == list(range(6))
    for group in groups:
        widest = max(len(texts[index].tokens) for index in group) - 1
        assert len(group) == 1 or len(group) * widest <= 40


def test_a_batch_points_each_label_at_the_one_before_it() -> None:
    rng = np.random.default_rng(0)
    texts = [random_text(rng, 6, first=4), random_text(rng, 9)]
    batch = TrainingBatch.of(texts, torch.device("cpu"))
    before = batch.ids.flatten()[batch.positions]
    assert before.tolist() == [*texts[0].tokens[3:5], *texts[1].tokens[:8]]
    assert batch.top_ids[:, 0].tolist() == [*texts[0].tokens[4:], *texts[1].tokens[1:]]


@torch.inference_mode()
def test_padding_and_neighbours_change_nothing_of_a_text() -> None:
    rng = np.random.default_rng(0)
    texts = [random_text(rng, 6), random_text(rng, 20)]
    student = Student(tiny_draft("llama"))
    kl, overlap, _ = student(TrainingBatch.of(texts, torch.device("cpu")))
    alone, alone_overlap, _ = student(TrainingBatch.of(texts[:1], torch.device("cpu")))
    torch.testing.assert_close(kl[:5], alone)
    torch.testing.assert_close(overlap[:5], alone_overlap)


def test_a_measurement_is_the_mean_over_positions_of_each_class() -> None:
    rng = np.random.default_rng(0)
    texts = [random_text(rng, 6), random_text(rng, 20), random_text(rng, 9, name="prose")]
    student = Student(tiny_draft("llama"))
    scores = evaluate(student, texts, Ranks("cpu"), max_tokens=12, precision=torch.float32)
    with torch.inference_mode():
        kl, overlap, agreed = student(TrainingBatch.of(texts[:2], torch.device("cpu")))
    code = scores["code"]
    assert code.overlap == pytest.approx(float(overlap.mean()), rel=1e-5)
    assert code.agreement == pytest.approx(float(agreed.float().mean()), rel=1e-5)
    assert code.kl == pytest.approx(float(kl.mean()), rel=1e-5)
    assert mean_overlap(scores) == pytest.approx((code.overlap + scores["prose"].overlap) / 2)


def test_a_sample_has_text_of_every_class() -> None:
    rng = np.random.default_rng(0)
    texts = [*(random_text(rng, 11) for _ in range(9)), random_text(rng, 50, name="prose")]
    some = sample(texts, tokens=25)
    assert [text.traffic_class for text in some] == ["code"] * 3 + ["prose"]


def plan_of(**changes: Any) -> TrainingPlan:
    return TrainingPlan(base=Path(), tokenizer=Path(), dataset=Path(), **changes)


def test_the_rate_rises_holds_and_falls_to_nothing() -> None:
    plan = plan_of(steps=100, warmup_steps=10, decay_share=0.5, learning_rate=1.0)
    rates = [plan.rate_at(step, 0.0) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert rates[10:50] == [1.0] * 40
    assert rates[75] == pytest.approx(0.5) and rates[100] == 0.0
    assert plan.progress(99, 0.0) < 1 and plan.progress(100, 0.0) == 1


def test_a_run_by_the_clock_ends_by_the_clock() -> None:
    plan = plan_of(minutes=2.0)
    assert plan.progress(10**6, 119.0) < 1
    assert plan.progress(1, 120.0) == 1


def test_the_first_part_is_kl_whatever_the_loss() -> None:
    plan = plan_of(steps=10, loss="tv", kl_share=0.3)
    assert [plan.loss_at(step, 0.0) for step in range(5)] == ["kl", "kl", "kl", "tv", "tv"]


@pytest.mark.parametrize("changes", [{}, {"steps": 3, "minutes": 1.0}])
def test_a_plan_has_one_length(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="either steps or minutes"):
        plan_of(**changes)
