"""Run stages as child processes with a niceness and limits on threads and time, which end with the loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from cloud_verifier.distill.config import DistillConfig
from cloud_verifier.distill.errors import PermanentFailure, StageFailed, TooLittleTraffic
from outrider.processes import tied_to_this_process

STOP_S = 30.0
"""Seconds that a stage has to save its work after SIGTERM."""
_SHOWN = 400
"""Characters of a failed stage's last line that its error has."""
COMMANDS: Mapping[str, Sequence[str]] = {
    "training": ["-m", "cloud_verifier.distill.training.run"],
    **{stage: ["-m", "cloud_verifier.distill.stages", stage] for stage in ("dataset", "export", "gate")},
}
_ERRORS = {error.exit_status: error for error in (PermanentFailure, TooLittleTraffic)}


async def run_stage(
    config: DistillConfig, stage: str, folder: Path, commands: Mapping[str, Sequence[str]] | None = None
) -> None:
    """Run the stage `dataset`, `training`, `export` or `gate` to its end, with its output in `<stage>.log` of `folder`.

    commands: arguments of Python for each stage, before the run's folder; this package's if None. If cancelled, stop
    the process and wait for it. Raises StageFailed.
    """
    minutes = config.stage_minutes + (config.train_minutes if stage == "training" else 0.0)
    arguments = (commands or COMMANDS)[stage]
    with (folder / f"{stage}.log").open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            # A stage must not outlive a loop that was killed, since the next loop would start another one.
            *tied_to_this_process(config.nice),
            *(sys.executable, *arguments, str(folder)),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | _environment(config.threads),
            start_new_session=True,  # Ctrl-C in a terminal reaches the loop alone, which stops the stage
        )
    try:
        async with asyncio.timeout(60 * minutes):
            status = await process.wait()
    except TimeoutError:
        raise StageFailed(f"{stage}: took longer than {minutes:.0f} minutes and was ended") from None
    finally:
        await _stop(process)
    if status != 0:
        error = _ERRORS.get(status, StageFailed)
        raise error(f"{stage}: exit status {status}; {_last_line(folder / f'{stage}.log')}")


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
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), STOP_S)
    except TimeoutError:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _last_line(path: Path) -> str:
    """Return the last line of a log, cut to `_SHOWN` characters; empty if the log is."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:_SHOWN] if lines else ""
