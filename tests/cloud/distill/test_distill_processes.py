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

from cloud_verifier.distill.errors import StageFailed
from cloud_verifier.distill.stages import NICE, run_stage

STAGE = """
import os, sys, time
open(sys.argv[2] + "/began", "w").write(f"{os.getpid()} {os.nice(0)}")
if sys.argv[1] == "hangs": time.sleep(60)
print("the disk is full", file=sys.stderr)
sys.exit(1)
"""
LOOP = """
import asyncio, pathlib, sys
from cloud_verifier.distill.stages import run_stage
asyncio.run(run_stage("hangs", pathlib.Path(sys.argv[1]), 60.0, 1, (sys.argv[2],)))
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    (tmp_path / "stage.py").write_text(STAGE)
    return tmp_path / "stage.py"


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


async def test_a_stage_that_fails_gives_its_reason(tmp_path: Path, program: Path) -> None:
    with pytest.raises(StageFailed, match="the disk is full"):
        await run_stage("fails", tmp_path, 60.0, 1, (str(program),))


async def test_a_stage_that_hangs_or_whose_loop_is_told_to_stop_is_ended(tmp_path: Path, program: Path) -> None:
    with pytest.raises(StageFailed, match="was ended"):
        await run_stage("hangs", tmp_path, 0.2, 1, (str(program),))
    (tmp_path / "began").unlink(missing_ok=True)
    stage = asyncio.create_task(run_stage("hangs", tmp_path, 60.0, 1, (str(program),)))
    pid, nice = await began(tmp_path)
    assert nice == min(19, os.nice(0) + NICE)
    stage.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stage
    assert not runs(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="a process can be tied to another on Linux alone")
async def test_a_stage_does_not_outlive_a_loop_that_is_killed(tmp_path: Path, program: Path) -> None:
    loop = await asyncio.create_subprocess_exec(sys.executable, "-c", LOOP, tmp_path, program)
    pid, _ = await began(tmp_path)
    loop.send_signal(signal.SIGKILL)
    await loop.wait()
    await until(lambda: not runs(pid))
