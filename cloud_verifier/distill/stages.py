"""Run one stage of a run: `python -m cloud_verifier.distill.stages STAGE RUN_DIR`, with STAGE dataset, export or gate.

A stage reads `job.json`, and writes its result whole or not at all, so that it can be killed and repeated. Its exit
status is 0 if it is done, or that of its error (`distill.errors`).
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

from pydantic import ValidationError

from cloud_verifier.distill.errors import PermanentFailure, StageFailed, TooLittleTraffic
from cloud_verifier.distill.run_folder import DATASET, DRAFT, HEADS, MODEL, VERDICT, Job
from outrider.artifacts import atomic_files
from outrider.core.errors import OutriderError

log = logging.getLogger(__name__)


def build_dataset(run: Path) -> None:
    """Build the dataset, after reading the training plan so that a wrong one is found early.

    Raises PermanentFailure and TooLittleTraffic.
    """
    from cloud_verifier.distill.data import dataset
    from cloud_verifier.distill.data.plan import DatasetPlan
    from cloud_verifier.distill.training.plan import TrainingPlan
    from cloud_verifier.traffic.segments import SegmentLog

    job = Job.read(run)
    TrainingPlan.read(run)
    card = dataset.build(SegmentLog(job.traffic), run / DATASET, DatasetPlan(**job.dataset), time.time())
    sessions = sum(card.heldout_sessions.get(name, 0) for name in job.fresh)
    if sessions < job.rule.sessions:
        shutil.rmtree(run / DATASET)
        raise TooLittleTraffic(
            f"{sessions} held-out sessions of the fresh classes, the gate needs {job.rule.sessions}: more traffic is"
            " waited for"
        )
    log.info("dataset: %d tokens to learn from, held out %s", card.train_tokens, dict(card.heldout))


def export_draft(run: Path) -> None:
    """Export the trained model as a quantized file, or heads as they are. Raises PermanentFailure and ModelRefused."""
    from cloud_verifier.distill.gguf.export import Quantization, export

    job = Job.read(run)
    if job.student == "heads":
        from cloud_verifier.engine.server_draft.head_models import describe_heads, load_heads

        load_heads(run / MODEL / HEADS, job.weights_hash)
        shutil.copyfile(run / MODEL / HEADS, run / job.artifact)
        log.info("exported %s", describe_heads(run / MODEL / HEADS))
        return
    kind = cast(Quantization, job.quantization)
    log.info(
        "exported %s", export(run / MODEL, job.target, run / DRAFT, kind, widened=job.widened, threads=job.threads)
    )


def judge(run: Path) -> None:
    """Measure the exported draft beside the incumbent, and write the gate's verdict."""
    from cloud_verifier.distill.data.plan import DatasetCard
    from cloud_verifier.distill.data.texts import HELDOUT, load_texts
    from cloud_verifier.distill.gguf import eval_gguf
    from cloud_verifier.distill.publishing import gate

    job, texts = Job.read(run), load_texts(run / DATASET / HELDOUT)
    if job.student == "heads":
        from cloud_verifier.distill.training import eval_heads

        served = job.incumbent if job.incumbent.is_file() else None
        comparison = eval_heads.compare(run / job.artifact, served, job.target, texts)
    else:
        comparison = eval_gguf.compare(run / DRAFT, job.incumbent, texts, job.threads)
    verdict = gate.decide(comparison, job.fresh, job.rule, DatasetCard.read(run / DATASET).train)
    atomic_files.write(run / VERDICT, json.dumps(verdict.to_json(), indent=1).encode())
    for group in verdict.classes:
        log.info(
            "class %r, %d sessions: tokens per step %.2f -> %.2f (%+.1f%%, at least %+.1f%%), acceptance %.3f -> %.3f",
            *(group.name, group.sessions, group.incumbent.chain, group.candidate.chain),
            *(100 * group.chain_gain, 100 * group.chain_least),
            *(group.incumbent.acceptance, group.candidate.acceptance),
        )


STAGES: Mapping[str, Callable[[Path], None]] = {"dataset": build_dataset, "export": export_draft, "gate": judge}


def main(arguments: Sequence[str]) -> int:
    """Run a stage; return the exit status. An error is the last line on stderr."""
    stage, run = STAGES[arguments[0]], Path(arguments[1])
    try:
        stage(run)
    except (StageFailed, OutriderError, OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        if isinstance(error, ValidationError):
            return PermanentFailure.exit_status
        return error.exit_status if isinstance(error, StageFailed) else StageFailed.exit_status
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    raise SystemExit(main(sys.argv[1:]))
