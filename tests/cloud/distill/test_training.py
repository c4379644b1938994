"""Test training: it learns, survives kills, and goes on where it was stopped."""

from __future__ import annotations

import json
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
from cloud_verifier.distill.training.plan import TrainingPlan
from cloud_verifier.distill.training.student import Student

NIGHTLY = pytest.mark.nightly("a training of a variant takes half a minute")


def trained(root: Path, name: str = "run", **changes: Any) -> Path:
    """Run a training to its end; return its folder."""
    tiny_plan(root, **changes).write(root / name)
    assert training.train(root / name)
    return root / name


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("loss", ["hybrid", pytest.param("kl", marks=NIGHTLY)])
def test_a_draft_comes_nearer_to_the_target_on_text_it_never_saw(loss: str, tmp_path: Path) -> None:
    run = trained(tmp_path, loss=loss, steps=40, measure_steps=20, learning_rate=1e-2)
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


@pytest.mark.parametrize(
    "changes", [{}, {"lora_rank": 4, "loss": "kl"}, pytest.param({"precision": "bfloat16"}, marks=NIGHTLY)]
)
def test_a_run_that_was_stopped_goes_on_from_its_weights_without_any_pickle(
    changes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("pickle")

    monkeypatch.setattr(torch, "load", refuse)
    monkeypatch.setattr(torch, "save", refuse)
    tiny_plan(tmp_path, steps=30, learning_rate=1e-2, measure_steps=10, **changes).write(tmp_path / "run")
    steps, folder = iter(range(1_000)), tmp_path / "run" / training.CHECKPOINTS
    assert training.train(tmp_path / "run", lambda: next(steps) == 12) is False
    assert not (tmp_path / "run" / "done.json").exists()
    progress = json.loads((folder / training.PROGRESS).read_bytes())
    assert progress["step"] == 13
    (folder / "checkpoint-20").mkdir()  # what a kill leaves in the midst of the next one
    seen: list[int] = []
    assert training.train(tmp_path / "run", lambda: bool(seen.append(1)))
    assert len(seen) == 30 - 13 - 1, "each step but the last asks whether to stop"
    done = json.loads((tmp_path / "run" / "done.json").read_text())
    assert done["step"] == 30 and done["seconds"] > progress["seconds"]
    assert done["validation_overlap"]["best"] > done["validation_overlap"]["before"]
    suffixes = {path.suffix for path in folder.rglob("*") if path.is_file()}
    assert suffixes == {".safetensors", ".json"}


def test_the_result_is_a_mean_of_what_was_learnt_and_what_was_known(tmp_path: Path) -> None:
    whole, mixed = (weights(trained(tmp_path, f"run-{share}", base_share=share)) for share in (0.0, 0.25))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base").state_dict()
    for name, tensor in mixed.items():
        torch.testing.assert_close(tensor, 0.75 * whole[name] + 0.25 * base[name], msg=name)
    assert not equal(mixed, whole)


def test_embeddings_are_trained_only_if_asked(tmp_path: Path) -> None:
    base = tiny_plan(tmp_path).base
    before, after = load_file(base / "model.safetensors"), weights(trained(tmp_path, train_embeddings=False))
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


def test_a_step_has_as_many_labels_as_asked_and_a_pass_no_more_tokens() -> None:
    texts = [random_text(np.random.default_rng(0), count) for count in (11, 21, 31, 41) * 5]  # 25 labels on average
    for batch_tokens, micro_tokens, expected in ((100, 1_000, (4, 1)), (250, 160, (3, 3)), (1, 1, (1, 1))):
        plan = plan_of(steps=1, batch_tokens=batch_tokens, micro_tokens=micro_tokens)
        assert training.passes_of(texts, plan) == expected
    assert training.passes_of(texts, plan_of(steps=1, batch_tokens=10**6, micro_tokens=10**6)) == (20, 1)


@torch.inference_mode()
def test_padding_and_neighbours_change_nothing_of_a_text() -> None:
    rng = np.random.default_rng(0)
    texts = [random_text(rng, 6), random_text(rng, 20)]
    student = Student(tiny_draft("llama"))
    together, alone = (student(**training.collate(some)) for some in (texts, texts[:1]))
    assert alone[0, 0] == 5 and together[1, 0] == 19
    torch.testing.assert_close(together[0], alone[0])


def plan_of(**changes: Any) -> TrainingPlan:
    return TrainingPlan(base=Path(), tokenizer=Path(), dataset=Path(), **changes)


def test_the_rate_rises_holds_and_falls_to_nothing(tmp_path: Path) -> None:
    plan = plan_of(steps=100, warmup_steps=10, decay_share=0.5)
    run = training.RunCallback(tmp_path, plan, lambda: False)
    rates = [run.rate_factor(step) for step in range(101)]
    assert rates[:10] == pytest.approx([0.1 * (step + 1) for step in range(10)])
    assert rates[10:50] == [1.0] * 40
    assert rates[75] == pytest.approx(0.5) and rates[100] == 0.0
    assert run.progress(99) < 1 and run.progress(100) == 1

    (tmp_path / training.PROGRESS).write_text('{"step": 70, "seconds": 1.0}')
    resumed = training.RunCallback(tmp_path, plan, lambda: False)
    assert [resumed.rate_factor(step) for step in (0, 5, 30)] == pytest.approx([0.06, 0.3, 0.0])
