"""Run the stages of a run, each in a process of its own: `python -m cloud_verifier.distill.stages STAGE RUN_DIR`.

A stage (dataset, training, export or gate) reads `job.json`, and writes its result whole or not at all, so that it can
be killed and repeated (`run_folder`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from cloud_verifier.distill.errors import StageFailed
from cloud_verifier.distill.run_folder import DATASET, DRAFT, EXPORT, HEADS, MODEL, VERDICT, Job, RunFolder
from outrider.artifacts import atomic_files
from outrider.core.errors import OutriderError
from outrider.processes import tied_to_this_process

log = logging.getLogger(__name__)

NICE = 10
"""Niceness added to each stage, so that verifiers on the same machine come first."""
STOP_S = 30.0
"""Seconds that a stage has to save its work after SIGTERM."""
_SHOWN = 400
"""Characters of a failed stage's last line that its error has."""


async def run_stage(
    stage: str, folder: Path, limit_s: float, threads: int = 1, program: Sequence[str] = ("-m", __name__)
) -> None:
    """Run a stage in a process of its own, with a niceness and limits on threads and time.

    Its output goes to `<stage>.log` of the run's `folder`. It ends with the loop: if this is cancelled, it is stopped
    and waited for. program: arguments of Python before the stage's name. Raises StageFailed.
    """
    with (folder / f"{stage}.log").open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            # A stage must not outlive a loop that was killed, since the next loop would start another one.
            *tied_to_this_process(NICE),
            *(sys.executable, *program, stage, str(folder)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | _environment(threads),
            start_new_session=True,  # Ctrl-C in a terminal reaches the loop alone, which stops the stage
        )
    try:
        async with asyncio.timeout(limit_s):
            status = await process.wait()
    except TimeoutError:
        raise StageFailed(f"{stage}: took longer than {limit_s / 60:.0f} minutes and was ended") from None
    finally:
        await _stop(process)
    if status != 0:
        raise StageFailed(f"{stage}: exit status {status}; {_last_line(folder / f'{stage}.log')}")


def _environment(threads: int) -> dict[str, str]:
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        # A thread that spins waits long for one that lost its core to another process: beside other load on two cores
        # a step of 1.2 s took 6 to 12 s with spinning, and 1.3 to 5 s without.
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
    }


async def _stop(process: asyncio.subprocess.Process) -> None:
    """End a process with SIGTERM, or with SIGKILL if that takes too long, and wait for it."""
    for end in (process.terminate, process.kill):
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError, TimeoutError):
                end()
                await asyncio.wait_for(process.wait(), STOP_S)


def _last_line(path: Path) -> str:
    """Return the last line of a log, cut to `_SHOWN` characters; empty if the log is."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:_SHOWN] if lines else ""


def build_dataset(run: Path) -> None:
    """Build the dataset. Raises StageFailed if there is nothing to learn from or to measure on."""
    from cloud_verifier.distill.data import dataset
    from cloud_verifier.distill.data.plan import DatasetPlan
    from cloud_verifier.traffic.log import TrafficLog

    job = Job.read(run)
    card = dataset.build(TrafficLog(job.traffic), run / DATASET, DatasetPlan(**job.dataset), time.time())
    log.info("dataset: %d tokens to learn from, held out %s", card.train_tokens, dict(card.heldout))


def export_draft(run: Path) -> None:
    """Export the trained model, quantized as the incumbent is, or heads as they are. Raises GgufError, ModelRefused."""
    job = Job.read(run)
    if job.heads:
        from cloud_verifier.engine.server_draft.head_models import describe_heads, load_heads

        load_heads(run / MODEL / HEADS, job.weights_hash)
        with atomic_files.replacing(run / HEADS) as partial:
            shutil.copyfile(run / MODEL / HEADS, partial)
        quantization, said = "BF16", describe_heads(run / MODEL / HEADS)
    else:
        from cloud_verifier.distill.gguf.export import export
        from cloud_verifier.distill.gguf.reader import stored_as

        quantization, embeddings = stored_as(job.incumbent)
        out = run / DRAFT
        said = str(export(run / MODEL, job.target, out, quantization, embeddings=embeddings, threads=job.threads))
    log.info("exported %s", said)
    RunFolder(run).write(EXPORT, {"quantization": quantization})


def judge(run: Path) -> None:
    """Measure the exported draft beside the incumbent, and write the gate's verdict."""
    from cloud_verifier.distill.data.plan import DatasetCard
    from cloud_verifier.distill.data.texts import HELDOUT, load_texts
    from cloud_verifier.distill.gguf import eval_gguf
    from cloud_verifier.distill.publishing import gate

    job, texts = Job.read(run), load_texts(run / DATASET / HELDOUT)
    if job.heads:
        from cloud_verifier.distill.training import eval_heads

        served = job.incumbent if job.incumbent.is_file() else None
        comparison = eval_heads.compare(run / job.artifact, served, job.target, texts)
    else:
        comparison = eval_gguf.compare(run / DRAFT, job.incumbent, texts, job.threads)
    verdict = gate.decide(comparison, job.fresh, job.rule, DatasetCard.read(run / DATASET).train)
    for note in verdict.notes:
        log.warning("%s", note)
    for group in verdict.classes:
        log.info(
            "class %r, %d sessions: tokens per step %.2f -> %.2f (%+.1f%%, at least %+.1f%%), acceptance %.3f -> %.3f",
            *(group.name, group.sessions, group.incumbent.chain, group.candidate.chain),
            *(100 * group.chain_gain, 100 * group.chain_least),
            *(group.incumbent.acceptance, group.candidate.acceptance),
        )
    RunFolder(run).write(VERDICT, verdict.to_json())


def train(run: Path) -> int:
    """Train by the run's plan, from its checkpoint on; return 0, or 128 plus the signal that stopped it."""
    from transformers.utils import logging as transformers_logging

    from cloud_verifier.distill.training import trainer

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    return trainer.train(run)


STAGES: Mapping[str, Callable[[Path], int | None]] = {
    "dataset": build_dataset,
    "training": train,
    "export": export_draft,
    "gate": judge,
}


def main(arguments: Sequence[str]) -> int:
    """Run a stage; return the exit status. An error is the last line on stderr."""
    stage, run = STAGES[arguments[0]], Path(arguments[1])
    try:
        return stage(run) or 0
    except (StageFailed, OutriderError, OSError, ValueError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    raise SystemExit(main(sys.argv[1:]))
