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

from cloud_verifier.distill import cli, stages
from cloud_verifier.distill.config import GateRule
from cloud_verifier.distill.data.plan import CARD
from cloud_verifier.distill.data.texts import HELDOUT, TRAIN, VALIDATION, Text, save_texts
from cloud_verifier.distill.publishing import gate
from cloud_verifier.distill.run_folder import DATASET, HEADS, JOB, MODEL, VERDICT, Job
from cloud_verifier.distill.training import heads_student
from cloud_verifier.distill.training import run as training
from cloud_verifier.distill.training.batches import TrainingBatch
from cloud_verifier.distill.training.eval_heads import compare
from cloud_verifier.distill.training.heads_student import load_target
from cloud_verifier.distill.training.losses import divergence
from cloud_verifier.distill.training.plan import TrainingPlan
from cloud_verifier.engine.server_draft.head_models import HeadsFile, HeadsShape, load_heads, new_heads, save_heads
from cloud_verifier.engine.server_draft.heads_folder import HeadsFolder

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
    texts, rule = written(12, seed=2), GateRule(sessions=6, positions=1)
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
        student="heads",
        traffic="",
        dataset={},
        target=target,
        weights_hash=identity,
        tokenizer_hash="",
        base=target,
        incumbent=target,
        quantization="Q8_0",
        fresh=("code",),
        rule=GateRule(sessions=6, positions=1),
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


@torch.no_grad()
def test_a_sample_of_the_vocabulary_gives_nearly_the_divergence_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads_student, "SAMPLED", 800)
    generator = torch.Generator().manual_seed(0)
    layer = torch.nn.Linear(8, 4_000)
    layer.weight.copy_(torch.randn(4_000, 8, generator=generator))
    top = torch.randn(50, 4_000, generator=generator).mul(3.0).log_softmax(-1).topk(2 * heads_student.LISTED)
    states, found = torch.randn(50, 8, generator=generator), {}
    for sampled, count in ((False, heads_student.LISTED), (True, 2 * heads_student.LISTED)):
        ids, log_probs = top.indices[:, :count], top.values[:, :count]
        batch = TrainingBatch(torch.zeros(1, 1), torch.zeros(50), ids, log_probs, 1 - log_probs.exp().sum(1))
        vocabulary = heads_student._Vocabulary(batch, layer, sampled=sampled)
        logits = vocabulary.logits(states)
        assert (logits.shape[1] < 2_000) is sampled
        found[sampled] = divergence(logits, vocabulary.top_ids, vocabulary.top_log_probs, vocabulary.tail)[0]
    assert float(found[True].mean()) == pytest.approx(float(found[False].mean()), rel=0.05)
    assert torch.allclose(found[True], found[False], rtol=0.3)


def test_heads_are_published_by_hand_into_the_folder_and_shown(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, identity = load_target(target)
    save_heads(tmp_path / "new.safetensors", new_heads(HeadsShape(hidden=64, depth=1, width=64)), identity)
    settings = ["--student", "heads", "--traffic", str(tmp_path / "traffic"), "--target", str(target)]
    settings += ["--draft", str(target), "--artifacts", str(tmp_path / "heads"), "--state-dir", str(tmp_path / "state")]
    for command in (["publish", str(tmp_path / "new.safetensors")], ["status"]):
        with pytest.raises(SystemExit) as ended:
            cli.main([*command, *settings])
        assert not ended.value.code
    published, *_, shown = capsys.readouterr().out.splitlines()
    (release,) = HeadsFolder(tmp_path / "heads", identity).releases()
    assert published == f"release 1, {release.digest}: canary"
    assert shown.split() == ["release", "1", f"{release.digest[:12]}:", "canary"]
