"""Test that heads are trained by the loop's trainer, measured on held-out text, and judged by the gate."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loop_fakes import card
from tiny_drafts import random_text, tiny_draft, tiny_tokenizer

from cloud_verifier.distill import gate, stages
from cloud_verifier.distill.config import DistillConfig, GateRule
from cloud_verifier.distill.evaluation import compare_heads
from cloud_verifier.distill.run_folder import CARD, HEADS, MODEL, VERDICT, Job, RunFolder
from cloud_verifier.distill.texts import HELDOUT, TRAIN, VALIDATION, Text, save_texts
from cloud_verifier.distill.training import trainer as training
from cloud_verifier.distill.training.heads_student import load_target
from cloud_verifier.distill.training.plan import TrainingPlan
from cloud_verifier.engine.server_draft.head_models import HeadsFile, HeadsShape, load_heads, new_heads, save_heads

PROMPT = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny random target, whose output layer is large enough to be sure of a token."""
    folder, module = tmp_path_factory.mktemp("target"), tiny_draft("qwen3-untied")
    with torch.no_grad():
        module.lm_head.weight.mul_(5.0)
    module.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def written(count: int, seed: int = 0) -> list[Text]:
    """Return texts of which each token follows from the one before, as labels by some target."""
    rng = np.random.default_rng(seed)
    return [replace(random_text(rng, 40, first=PROMPT), session=number) for number in range(count)]


def plan(root: Path, target: Path, **changes: Any) -> TrainingPlan:
    save_texts(root / "dataset" / TRAIN, written(24))
    save_texts(root / "dataset" / VALIDATION, written(4, seed=1))
    settings: dict[str, Any] = {
        "base": target,
        "tokenizer": target,
        "dataset": root / "dataset",
        "heads": {"depth": 3, "width": 64},
        "steps": 60,
        "batch_tokens": 216,
        "learning_rate": 1e-2,
        "measure_steps": 30,
        "warmup_steps": 5,
    }
    return TrainingPlan(**settings | changes)


@pytest.mark.parametrize("kind", ["medusa", "eagle"])
def test_heads_learn_to_predict_their_target_on_text_they_never_saw(kind: str, target: Path, tmp_path: Path) -> None:
    learning = plan(tmp_path, target, heads={"kind": kind, "depth": 3, "width": 64})
    learning.write(tmp_path / "run")
    assert training.train(tmp_path / "run")
    done = json.loads((tmp_path / "run" / "done.json").read_text())["validation_overlap"]
    assert done["best"] > done["before"] + 0.1
    file, (_, identity) = tmp_path / "run" / MODEL / HEADS, load_target(target)
    heads = load_heads(file, identity)
    assert HeadsFile.read(file).shape == heads.shape and heads.shape.kind == kind

    save_heads(tmp_path / "untrained", new_heads(heads.shape), identity)
    texts, rule = written(12, seed=2), GateRule(sessions=6, positions=1, slower=100.0)
    first = gate.decide(compare_heads(file, None, target, texts), {"code"}, rule)
    assert first.passed and first.groups[0].incumbent.chain == 1.0
    assert first.groups[0].candidate.chain > 1.1
    again = gate.decide(compare_heads(file, tmp_path / "untrained", target, texts), {"code"}, rule)
    assert again.groups[0].chain_gain > 0.0
    assert not gate.decide(compare_heads(tmp_path / "untrained", file, target, texts), {"code"}, rule).passed


def test_the_stages_of_a_run_judge_the_file_that_is_served(target: Path, tmp_path: Path) -> None:
    learning = plan(tmp_path, target)
    settings: dict[str, Any] = {"traffic": "", "target": target, "draft": target, "artifacts": tmp_path}
    options = {"steps": 60, "batch_tokens": 216, "learning_rate": 1e-2, "heads": learning.heads}
    rule = GateRule(sessions=6, positions=1)
    config = DistillConfig(**settings, state_dir=tmp_path, training_options=options, gate=rule)
    _, identity = load_target(target)
    numbers: dict[str, Any] = {"tokens": 0, "since_unix": 0.0, "newest_unix": 0.0, "tokenizer_hash": "", "parent": ""}
    job = Job(weights_hash=identity, base=target, incumbent=target, **numbers)
    run = RunFolder.begin(config.runs, 1, job)
    (tmp_path / "dataset").rename(run.dataset)
    save_texts(run.dataset / HELDOUT, written(12, seed=2))
    (run.dataset / CARD).write_text(card(1e12).replace("sums", "code"))
    for stage in ("training", "export", "gate"):
        assert run.stage == stage
        stages.STAGES[stage](config, run, lambda: False)
    assert (run.path / HEADS).read_bytes() == (run.path / MODEL / HEADS).read_bytes()
    assert run.read(VERDICT)["passed"]


def test_training_goes_on_from_a_file_of_heads(target: Path, tmp_path: Path) -> None:
    _, identity = load_target(target)
    heads = new_heads(HeadsShape(hidden=64, depth=2, width=64), 5)
    save_heads(tmp_path / "served.safetensors", heads, identity)
    learning = plan(tmp_path, target, base=tmp_path / "served.safetensors", steps=1, learning_rate=1e-6)
    learning.write(tmp_path / "run")
    assert training.train(tmp_path / "run")
    after = load_heads(tmp_path / "run" / MODEL / HEADS, identity)
    assert after.shape == heads.shape
    for name, value in heads.state_dict().items():
        assert torch.allclose(after.state_dict()[name], value, atol=1e-2), name
