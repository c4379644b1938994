"""Heads on the target, trained on what it wrote by the same trainer as in the distillation loop."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from cloud_verifier.distill.data.texts import TRAIN, VALIDATION, Text, save_texts
from cloud_verifier.distill.run_folder import DONE, HEADS, MODEL
from cloud_verifier.distill.training import trainer
from cloud_verifier.distill.training.plan import TrainingPlan
from models.recipe.settings import Job

_VALIDATION_EVERY = 32
"""One text in so many chooses the best checkpoint."""


def build(job: Job) -> None:
    """Write ``heads/<kind>/model/heads.safetensors`` for the plan's kind of heads."""
    folder, plan = job.stage("heads"), job.scale.heads
    dataset = folder / "dataset"
    if not (dataset / VALIDATION).is_dir():
        texts = [text for path in sorted(job.stage("generate").glob("part-*.json")) for text in texts_of(path)]
        save_texts(dataset / TRAIN, [text for number, text in enumerate(texts) if number % _VALIDATION_EVERY])
        save_texts(dataset / VALIDATION, texts[::_VALIDATION_EVERY])
    target = job.stage("target") / "model"
    training = TrainingPlan(
        base=target,
        tokenizer=target,
        dataset=dataset,
        heads={"kind": plan.kind, "depth": plan.depth},
        minutes=plan.minutes,
        learning_rate=plan.learning_rate,
        batch_tokens=plan.batch_tokens,
        warmup_steps=40,
        measure_steps=200,
        measure_tokens=2_048,
        threads=job.threads,
        device=job.device,
        seed=job.seed,
    )
    out = folder / plan.kind
    training.write(out)
    if code := trainer.train(out):
        raise KeyboardInterrupt(f"stopped with exit code {code}; run the same command to go on")
    (folder / "done.json").write_text((out / DONE).read_text(encoding="utf-8"), encoding="utf-8")
    print(f"heads: {out / MODEL / HEADS}", flush=True)


def adopt(job: Job, target: Path) -> None:
    """Take over a finished target with its tokenizer, so that heads for it can be made without it."""
    if not (job.stage("target") / "model").exists():
        shutil.copytree(target, job.stage("target") / "model")
    shutil.copy2(target / "tokenizer.json", job.stage("tokenizer") / "tokenizer.json")


def texts_of(path: Path) -> list[Text]:
    """Return the texts of a generated part, whose labels are what the target wrote up to its end."""
    part, kind = load_file(path.with_suffix(".safetensors")), json.loads(path.read_text(encoding="utf-8"))["kind"]
    count, top = part["top_ids"].shape[1:]
    prompt = part["tokens"].shape[1] - count
    texts = []
    for tokens, ids, log_probs, counted in zip(
        part["tokens"], part["top_ids"], part["top_log_probs"], part["counted"], strict=True
    ):
        length = int(counted.sum())
        p = log_probs[:length].astype(np.float32)
        tail = np.clip(1.0 - np.exp(p).sum(1), 0.0, 1.0).astype(np.float32)
        texts.append(
            Text(
                traffic_class=kind,
                tenant="",
                tokens=tokens[: prompt + length].astype(np.int32),
                top_ids=np.concatenate([np.zeros((prompt, top), np.int32), ids[:length].astype(np.int32)]),
                top_log_probs=np.concatenate([np.zeros((prompt, top), np.float32), p]),
                tail=np.concatenate([np.zeros(prompt, np.float32), tail]),
                first=prompt,
            )
        )
    return texts
