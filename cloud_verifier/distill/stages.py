"""Do the stages of a run that work on files: dataset, training, export and gate.

Each reads what the ones before have written into the run's folder, and writes its result whole or not at all, so that
it can be killed and repeated (`run_folder`).
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cloud_verifier.distill import evaluation, gate
from cloud_verifier.distill.config import TRAIN_MINUTES, DistillConfig
from cloud_verifier.distill.dataset import DatasetCard, DatasetPlan, build
from cloud_verifier.distill.run_folder import DRAFT, EXPORT, HEADS, MODEL, PLAN, VERDICT, RunFolder
from cloud_verifier.distill.texts import HELDOUT, load_texts
from cloud_verifier.distill.training.plan import TrainingPlan
from cloud_verifier.traffic.log import TrafficLog
from outrider.artifacts import atomic_files

log = logging.getLogger(__name__)

OTHER_STAGES_MINUTES = 150.0
"""Minutes that a run's other stages and a retry may take besides its training."""

StageFunction = Callable[[DistillConfig, RunFolder, Callable[[], bool]], None]
"""Does a stage. The last argument says whether it should stop; then its result may be missing. Raises StageFailed, a
core error, OSError or ValueError."""


def dataset_plan(config: DistillConfig, **fields: Any) -> DatasetPlan:
    """Return the plan of a dataset. Raises pydantic.ValidationError."""
    given = {name: value for name, value in config.training_options.items() if name in DatasetPlan.model_fields}
    return DatasetPlan(**fields | given)


def training_plan(config: DistillConfig, base: Path, dataset: Path) -> TrainingPlan:
    """Return the plan of a training on a dataset that begins with `base`. Raises pydantic.ValidationError."""
    fields: dict[str, Any] = {"base": base, "tokenizer": config.target.resolve(), "dataset": dataset.resolve()}
    fields |= {} if "steps" in config.training_options else {"minutes": TRAIN_MINUTES}
    fields |= {"heads": {}} if config.heads else {}
    of_dataset = DatasetPlan.model_fields.keys() - TrainingPlan.model_fields.keys()
    given = {name: value for name, value in config.training_options.items() if name not in of_dataset}
    return TrainingPlan(**fields | given)


def build_dataset(config: DistillConfig, run: RunFolder, stop: Callable[[], bool]) -> None:
    """Build the dataset. Raises StageFailed if there is nothing to learn from or to measure on."""
    job, minutes = run.job, float(config.training_options.get("minutes", TRAIN_MINUTES)) + OTHER_STAGES_MINUTES
    plan = dataset_plan(config, weights_hash=job.weights_hash, fresh_since_unix=job.since_unix, lasts_s=60 * minutes)
    card = build(TrafficLog(config.traffic), run.dataset, plan, time.time())
    log.info("dataset: %d tokens to learn from, held-out sessions %s", card.train_tokens, card.heldout_sessions)


def train(config: DistillConfig, run: RunFolder, stop: Callable[[], bool]) -> None:
    """Train by the run's plan, which is made first, from the checkpoint on if there is one."""
    from cloud_verifier.distill.training import trainer

    if not run.has(PLAN):
        training_plan(config, run.job.base, run.dataset).write(run.path)
    trainer.train(run.path, stop)


def export_draft(config: DistillConfig, run: RunFolder, stop: Callable[[], bool]) -> None:
    """Export the trained model, quantized as the incumbent is, or heads as they are.

    Raises StageFailed and ModelRefused.
    """
    if config.heads:
        from cloud_verifier.engine.server_draft.head_models import describe_heads, load_heads

        load_heads(run.path / MODEL / HEADS, run.job.weights_hash)
        with atomic_files.replacing(run.path / HEADS) as partial:
            shutil.copyfile(run.path / MODEL / HEADS, partial)
        quantization, said = "BF16", describe_heads(run.path / HEADS)
    else:
        from cloud_verifier.distill.gguf_files import export, stored_as

        quantization, embeddings = stored_as(run.job.incumbent)
        said = export(
            run.path / MODEL,
            config.target,
            run.path / DRAFT,
            quantization,
            embeddings=embeddings,
            threads=config.threads,
        )
    log.info("exported %s", said)
    run.write(EXPORT, {"quantization": quantization})


def judge(config: DistillConfig, run: RunFolder, stop: Callable[[], bool]) -> None:
    """Measure the exported file beside the incumbent, and write the gate's verdict."""
    texts, incumbent = load_texts(run.dataset / HELDOUT), run.job.incumbent
    if config.heads:
        served = incumbent if incumbent.is_file() else None
        comparison = evaluation.compare_heads(run.path / HEADS, served, config.target, texts)
    else:
        comparison = evaluation.compare(run.path / DRAFT, incumbent, texts, config.threads)
    verdict = gate.decide(comparison, DatasetCard.read(run.dataset).fresh, config.gate)
    for group in verdict.groups:
        log.info(
            "class %r, %d sessions: tokens per step %.2f -> %.2f (%+.1f%%, at least %+.1f%%), acceptance %.3f -> %.3f",
            *(group.name, group.sessions, group.incumbent.chain, group.candidate.chain),
            *(100 * group.chain_gain, 100 * group.chain_least),
            *(group.incumbent.acceptance, group.candidate.acceptance),
        )
    run.write(VERDICT, verdict.to_json())


STAGES: Mapping[str, StageFunction] = {
    "dataset": build_dataset,
    "training": train,
    "export": export_draft,
    "gate": judge,
}
