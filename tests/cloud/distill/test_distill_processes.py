"""Test the processes of stages: they end in time, with the loop, and say why they failed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from loop_fakes import World

from cloud_verifier.distill.config import DistillConfig
from cloud_verifier.distill.errors import PermanentFailure, StageFailed, TooLittleTraffic
from cloud_verifier.distill.stages import run_stage

STAGE = """
import os, sys, time
open(sys.argv[2] + "/began", "w").write(f"{os.getpid()} {os.nice(0)}")
if sys.argv[1] == "hangs": time.sleep(60)
print("the disk is full", file=sys.stderr)
sys.exit({"permanent": 3, "early": 4}.get(sys.argv[1], 1))
"""
LOOP = """
import asyncio, pathlib, sys
from cloud_verifier.distill.config import DistillConfig
from cloud_verifier.distill.stages import run_stage
config = DistillConfig.model_validate_json(sys.argv[1])
asyncio.run(run_stage(config, "hangs", pathlib.Path(sys.argv[2]), (sys.argv[3],)))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "stage.py").write_text(STAGE)
    return tmp_path / "stage.py"


def config_of(folder: Path, minutes: float) -> DistillConfig:
    return World(folder, settings={"nice": 3, "stage_minutes": minutes}).config


async def until(condition: Callable[[], object]) -> None:
    give_up = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.01)


async def began(folder: Path) -> tuple[int, int]:
    """Return the process id and the niceness of the stage, once it has begun."""
    file = folder / "began"
    await until(lambda: file.exists() and file.read_text())
    pid, nice = file.read_text().split()
    return int(pid), int(nice)


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("stage", "error"), [("fails", StageFailed), ("permanent", PermanentFailure), ("early", TooLittleTraffic)]
)
async def test_a_stage_that_fails_gives_its_reason(
    stage: str, error: type[StageFailed], tmp_path: Path, program: Path
) -> None:
    with pytest.raises(error, match="the disk is full") as failed:
        await run_stage(config_of(tmp_path, 1.0), stage, tmp_path, (str(program),))
    assert type(failed.value) is error


async def test_a_stage_that_hangs_or_whose_loop_is_told_to_stop_is_ended(tmp_path: Path, program: Path) -> None:
    with pytest.raises(StageFailed, match="was ended"):
        await run_stage(config_of(tmp_path, 0.2 / 60), "hangs", tmp_path, (str(program),))
    (tmp_path / "began").unlink(missing_ok=True)
    stage = asyncio.create_task(run_stage(config_of(tmp_path, 1.0), "hangs", tmp_path, (str(program),)))
    pid, nice = await began(tmp_path)
    assert nice == os.nice(0) + 3
    stage.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stage
    assert not runs(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="a process can be tied to another on Linux alone")
async def test_a_stage_does_not_outlive_a_loop_that_is_killed(tmp_path: Path, program: Path) -> None:
    config = config_of(tmp_path, 1.0).model_dump_json()
    loop = await asyncio.create_subprocess_exec(sys.executable, "-c", LOOP, config, tmp_path, program)
    pid, _ = await began(tmp_path)
    loop.send_signal(signal.SIGKILL)
    await loop.wait()
    await until(lambda: not runs(pid))
