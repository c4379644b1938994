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

from cloud_verifier.distill import stages
from cloud_verifier.distill.config import GateRule
from cloud_verifier.distill.data.plan import CARD
from cloud_verifier.distill.data.texts import HELDOUT, TRAIN, VALIDATION, Text, save_texts
from cloud_verifier.distill.publishing import gate
from cloud_verifier.distill.run_folder import DATASET, HEADS, JOB, MODEL, VERDICT, Job
from cloud_verifier.distill.training import trainer as training
from cloud_verifier.distill.training.eval_heads import compare
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
    assert training.train(tmp_path / "run") == 0
    done = json.loads((tmp_path / "run" / "done.json").read_text())["validation_overlap"]
    assert done["best"] > done["before"] + 0.1
    file, (_, identity) = tmp_path / "run" / MODEL / HEADS, load_target(target)
    heads = load_heads(file, identity)
    assert HeadsFile.read(file).shape == heads.shape and heads.shape.kind == kind

    save_heads(tmp_path / "untrained", new_heads(heads.shape), identity)
    texts, rule = written(12, seed=2), GateRule(sessions=6, positions=1, slower=100.0)
    first = gate.decide(compare(file, None, target, texts), {"code"}, rule)
    assert first.passed and first.fresh is not None and first.fresh.incumbent.chain == 1.0
    assert first.fresh.candidate.chain > 1.1
    again = gate.decide(compare(file, tmp_path / "untrained", target, texts), {"code"}, rule)
    assert again.fresh is not None and again.fresh.chain_gain > 0.0
    assert not gate.decide(compare(tmp_path / "untrained", file, target, texts), {"code"}, rule).passed


def test_the_stages_of_a_run_judge_the_file_that_is_served(target: Path, tmp_path: Path) -> None:
    _, identity = load_target(target)
    run = tmp_path / "run"
    learning = plan(tmp_path, target)
    learning.write(run)
    assert training.train(run) == 0
    (tmp_path / "dataset").rename(run / DATASET)
    save_texts(run / DATASET / HELDOUT, written(12, seed=2))
    (run / DATASET / CARD).write_text(card(1e12))
    job = Job(
        cause="",
        tokens=0,
        newest_unix=0.0,
        usual={},
        heads=True,
        traffic="",
        dataset={},
        target=target,
        weights_hash=identity,
        tokenizer_hash="",
        base=target,
        incumbent=target,
        parent="",
        fresh=("code",),
        rule=GateRule(sessions=6, positions=1, slower=100.0),
    )
    (run / JOB).write_text(job.model_dump_json())
    stages.export_draft(run)
    stages.judge(run)
    assert (run / HEADS).read_bytes() == (run / MODEL / HEADS).read_bytes()
    assert json.loads((run / VERDICT).read_text())["passed"]


def test_training_goes_on_from_a_file_of_heads(target: Path, tmp_path: Path) -> None:
    _, identity = load_target(target)
    heads = new_heads(HeadsShape(hidden=64, depth=2, width=64), 5)
    save_heads(tmp_path / "served.safetensors", heads, identity)
    learning = plan(tmp_path, target, base=tmp_path / "served.safetensors", steps=1, learning_rate=1e-6)
    learning.write(tmp_path / "run")
    assert training.train(tmp_path / "run") == 0
    after = load_heads(tmp_path / "run" / MODEL / HEADS, identity)
    assert after.shape == heads.shape
    for name, value in heads.state_dict().items():
        assert torch.allclose(after.state_dict()[name], value, atol=1e-2), name
