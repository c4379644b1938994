"""The stages of a run, each a process of its own: `python -m cloud_verifier.distill.stages STAGE RUN_DIR`.

A stage reads `job.json` and writes what it makes whole or not at all, so that it can be killed and begun again. Its
exit status says whether that may help: 0 done, `HOPELESS` the same would come of it again, `EARLY`
there is too little traffic, anything else try again.
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

from cloud_verifier.distill import job
from cloud_verifier.distill.job import EARLY, HOPELESS, Job
from outrider.artifacts import atomic_files
from outrider.core.errors import OutriderError

log = logging.getLogger(__name__)


class Hopeless(Exception):
    """Trying again cannot help; says why."""


class TooEarly(Exception):
    """There is too little traffic as yet; says what is missing."""


def build_dataset(run: Path) -> None:
    """The dataset, and a look at the training plan, so that a wrong one is told at once."""
    from cloud_verifier.distill.data import dataset
    from cloud_verifier.distill.training.plan import TrainingPlan
    from cloud_verifier.traffic.segments import SegmentLog

    told = Job.read(run)
    TrainingPlan.read(run)
    try:
        card = dataset.build(
            SegmentLog(told.traffic), run / job.DATASET, dataset.DatasetPlan(**told.dataset), time.time()
        )
    except dataset.DatasetEmpty as error:
        raise Hopeless(str(error)) from error
    sessions = sum(card.heldout_sessions.get(name, 0) for name in told.fresh)
    if sessions < told.rule.sessions:
        shutil.rmtree(run / job.DATASET)
        raise TooEarly(
            f"{sessions} held-out sessions of the fresh classes, the gate needs {told.rule.sessions}: more traffic is"
            " waited for"
        )
    log.info("dataset: %d tokens to learn from, held out %s", card.train_tokens, dict(card.heldout))


def export_draft(run: Path) -> None:
    from cloud_verifier.distill.gguf.export import Kind, export
    from cloud_verifier.distill.gguf.exporter import ExportError

    told = Job.read(run)
    kind, out = cast(Kind, told.quantization), run / job.DRAFT
    try:
        exported = export(run / job.MODEL, told.target, out, kind, widened=told.widened, threads=told.threads)
    except ExportError as error:
        raise Hopeless(str(error)) from error
    log.info("exported %d bytes, %s; %d strings split alike", exported.size, dict(exported.types), exported.probes)


def judge(run: Path) -> None:
    from cloud_verifier.distill.data import dataset
    from cloud_verifier.distill.gguf import eval_gguf
    from cloud_verifier.distill.publishing import gate

    told = Job.read(run)
    measured = eval_gguf.compare(run / job.DRAFT, told.incumbent, dataset.heldout(run / job.DATASET), told.threads)
    learnt = dataset.read_card(run / job.DATASET).train
    verdict = gate.decide(measured, told.fresh, told.rule, learnt)
    atomic_files.write(
        run / job.VERDICT, json.dumps(verdict.to_json() | {"metrics": verdict.metrics()}, indent=1).encode()
    )
    for group in verdict.classes:
        log.info(
            "class %r, %d sessions: tokens per step %.2f -> %.2f (%+.1f%%, at least %+.1f%%), acceptance %.3f -> %.3f",
            *(group.name, group.sessions, group.incumbent.chain, group.candidate.chain),
            *(100 * group.chain_gain, 100 * group.chain_least),
            *(group.incumbent.acceptance, group.candidate.acceptance),
        )


STAGES: Mapping[str, Callable[[Path], None]] = {"dataset": build_dataset, "export": export_draft, "gate": judge}


def main(arguments: Sequence[str]) -> int:
    """Exit status. What went wrong is the last line on stderr."""
    stage, run = STAGES[arguments[0]], Path(arguments[1])
    try:
        stage(run)
    except TooEarly as error:
        print(error, file=sys.stderr)
        return EARLY
    except (Hopeless, ValidationError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return HOPELESS
    except (OutriderError, OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    raise SystemExit(main(sys.argv[1:]))
