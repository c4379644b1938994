"""Runs the stages as child processes: nicer than what serves, bounded in threads and time, and gone with the loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from cloud_verifier.distill.job import EARLY, HOPELESS

log = logging.getLogger(__name__)

STOP_S = 30.0
"""For a stage to save itself after SIGTERM."""
_SAID = 400
"""Letters of a failed stage's last line that are passed on."""
# Even if the loop is killed outright, a stage does not outlive it (Linux): the loop's next life would start another.
_LAUNCHER = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.nice(int(sys.argv[2]))
    os.execv(sys.executable, [sys.executable, *sys.argv[3:]])
"""


class StageFailed(Exception):
    """A stage that ended without what it is for. `hopeless`: trying again cannot help. `early`: more traffic can."""

    def __init__(self, stage: str, reason: str, *, hopeless: bool = False, early: bool = False) -> None:
        self.early = early
        super().__init__(f"{stage}: {reason}")
        self.hopeless = hopeless


class Stages(Protocol):
    """Runs `dataset`, `training`, `export` or `gate` in a run's folder. Raises StageFailed."""

    async def run(self, stage: str, folder: Path) -> None: ...


@dataclass(frozen=True)
class Budget:
    """What a stage may take."""

    threads: int
    nice: int
    train_s: float
    """Seconds of training; beyond them it has as long as other stages to begin and to end."""
    stage_s: float
    ranks: int = 1


class Children:
    """Each stage a Python process, with its output in `<stage>.log` of the run's folder."""

    def __init__(self, budget: Budget, modules: Mapping[str, Sequence[str]] | None = None) -> None:
        """modules: arguments of Python for a stage, before the run's folder; those of this package where None."""
        self._budget = budget
        self._modules = modules or _modules(budget)

    async def run(self, stage: str, folder: Path) -> None:
        """Cancelled, it ends the process in order and waits for it."""
        limit_s = self._budget.stage_s + (self._budget.train_s if stage == "training" else 0.0)
        with (folder / f"{stage}.log").open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), str(self._budget.nice)),
                *(*self._modules[stage], str(folder)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self._environment(),
                start_new_session=True,  # Ctrl-C in a terminal reaches the loop alone, which ends us in order
            )
        try:
            async with asyncio.timeout(limit_s):
                status = await process.wait()
        except TimeoutError:
            raise StageFailed(stage, f"took longer than {limit_s / 60:.0f} minutes and was ended") from None
        finally:
            await _end(process)
        if status != 0:
            said = f"exit status {status}; {_last_line(folder / f'{stage}.log')}"
            raise StageFailed(stage, said, hopeless=status == HOPELESS, early=status == EARLY)

    def _environment(self) -> dict[str, str]:
        threads = str(self._budget.threads)
        ours = {
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            # A thread that spins waits long for one that lost its core to another process: beside other load on two
            # cores a step of 1.2 s took 6 to 12 s with spinning, and 1.3 to 5 s without.
            "OMP_WAIT_POLICY": "passive",
            "TOKENIZERS_PARALLELISM": "false",
        }
        return {**os.environ, **ours}


def _modules(budget: Budget) -> dict[str, Sequence[str]]:
    trainer = ["-m", "cloud_verifier.distill.training.run"]
    if budget.ranks > 1:
        trainer = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={budget.ranks}", *trainer]
    stages = {stage: ["-m", "cloud_verifier.distill.stages", stage] for stage in ("dataset", "export", "gate")}
    return {"training": trainer, **stages}


async def _end(process: asyncio.subprocess.Process) -> None:
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
    """What a stage said last; "" where it said nothing."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 4096))
        lines = file.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:_SAID] if lines else ""
