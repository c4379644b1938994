"""Test training: it learns, survives kills, and goes on where it was stopped."""

from __future__ import annotations

import itertools
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_drafts import random_text, tiny_draft, tiny_plan, tiny_tokenizer
from transformers import AutoModelForCausalLM

from cloud_verifier.distill.gguf_files import write_gguf
from cloud_verifier.distill.run_folder import StageFailed
from cloud_verifier.distill.training import trainer as training
from cloud_verifier.distill.training.batches import BatchSampler, TrainingBatch, micro_batches
from cloud_verifier.distill.training.plan import TrainingPlan
from cloud_verifier.distill.training.student import Student


def trained(root: Path, name: str = "run", **changes: Any) -> Path:
    """Run a training to its end; return its folder."""
    tiny_plan(root, **changes).write(root / name)
    assert training.train(root / name)
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
    model = AutoModelForCausalLM.from_pretrained(run / "model")
    assert model.config.model_type == "qwen3" and (run / "model" / "tokenizer.json").exists()


def test_a_gguf_draft_is_trained_as_its_own_weights_would_be(tmp_path: Path) -> None:
    base = tiny_plan(tmp_path).base
    write_gguf(tiny_draft("qwen3"), tiny_tokenizer(), tmp_path / "base.gguf", "base")
    from_folder = trained(tmp_path, "folder", steps=4)
    from_file = trained(tmp_path, "file", base=tmp_path / "base.gguf", tokenizer=base, steps=4)
    assert equal(weights(from_file), weights(from_folder))


def test_the_best_weights_are_kept_and_not_the_last(tmp_path: Path) -> None:
    good = trained(tmp_path, "good", learning_rate=1e-2, steps=40)
    # A rate at which nothing better can come of it.
    run = trained(tmp_path, base=good / "model", learning_rate=3.0, steps=8)
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
    with pytest.raises(StageFailed, match="lower learning rate"):
        training.train(tmp_path / "run")


def stopped_at(run: Path, step: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Run until the training is at `step`, and have it stop there; return whether it has ended."""
    original, reached = training.DraftTrainer._step, threading.Event()

    def stepping(trainer: Any, *how: Any) -> None:
        original(trainer, *how)
        if trainer.progress.step == step:
            reached.set()

    with monkeypatch.context() as patch:
        patch.setattr(training.DraftTrainer, "_step", stepping)
        return training.train(run, reached.is_set)


@pytest.mark.parametrize("changes", [{}, {"lora_rank": 4, "loss": "kl"}, {"precision": "bfloat16"}])
def test_a_run_that_was_stopped_gives_the_bits_of_one_that_was_not(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = trained(tmp_path, "whole", **changes)
    tiny_plan(tmp_path, **changes).write(tmp_path / "halves")
    assert stopped_at(tmp_path / "halves", 3, monkeypatch) is False
    assert not (tmp_path / "halves" / "done.json").exists()
    assert stopped_at(tmp_path / "halves", 9, monkeypatch) is False
    assert training.train(tmp_path / "halves")
    assert equal(weights(tmp_path / "halves"), weights(whole))


def test_a_checkpoint_of_another_plan_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny_plan(tmp_path).write(tmp_path / "run")
    stopped_at(tmp_path / "run", 2, monkeypatch)
    tiny_plan(tmp_path, learning_rate=1e-4).write(tmp_path / "run")
    with pytest.raises(StageFailed, match="another plan"):
        training.train(tmp_path / "run")


def test_the_result_is_a_mean_of_what_was_learnt_and_what_was_known(tmp_path: Path) -> None:
    whole, mixed = (weights(trained(tmp_path, f"run-{share}", base_share=share)) for share in (0.0, 0.25))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    for name, tensor in mixed.items():
        torch.testing.assert_close(tensor, 0.75 * whole[name] + 0.25 * base[name], msg=name)
    assert not equal(mixed, whole)


def test_embeddings_are_trained_only_if_they_have_a_rate(tmp_path: Path) -> None:
    base = tiny_plan(tmp_path).base
    before, after = load_file(base / "model.safetensors"), weights(trained(tmp_path, token_rate_share=0.0))
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if "embed_tokens" in name or "lm_head" in name}


def test_adapters_are_merged_into_the_layers_and_leave_the_embeddings(tmp_path: Path) -> None:
    run = trained(tmp_path, lora_rank=4, steps=30, learning_rate=1e-2)
    base, after = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict(), weights(run)
    change = after["model.layers.1.mlp.up_proj.weight"] - base["model.layers.1.mlp.up_proj.weight"]
    assert torch.linalg.matrix_rank(change, atol=1e-5) == 4
    assert torch.equal(after["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    overlap = json.loads((run / "done.json").read_text())["validation_overlap"]
    assert overlap["best"] > overlap["before"]


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


@torch.inference_mode()
def test_padding_and_neighbours_change_nothing_of_a_text() -> None:
    rng = np.random.default_rng(0)
    texts = [random_text(rng, 6), random_text(rng, 20)]
    student = Student(tiny_draft("llama"))
    kl, overlap = student(TrainingBatch.of(texts, torch.device("cpu")))
    alone, alone_overlap = student(TrainingBatch.of(texts[:1], torch.device("cpu")))
    torch.testing.assert_close(kl[:5], alone)
    torch.testing.assert_close(overlap[:5], alone_overlap)


def plan_of(**changes: Any) -> TrainingPlan:
    return TrainingPlan(base=Path(), tokenizer=Path(), dataset=Path(), **changes)


def test_the_rate_rises_holds_and_falls_to_nothing() -> None:
    plan = plan_of(steps=100, warmup_steps=10, decay_share=0.5, learning_rate=1.0)
    rates = [plan.rate_at(step, 0.0) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert rates[10:50] == [1.0] * 40
    assert rates[75] == pytest.approx(0.5) and rates[100] == 0.0
    assert plan.progress(99, 0.0) < 1 and plan.progress(100, 0.0) == 1
