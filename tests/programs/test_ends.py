"""Test that programs end at once when their work has ended, with their exit handlers and without Python's cleanup."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.cluster import Cluster

LARGE = """
import sys, time
class Large:
    def __del__(self, sleep=time.sleep):
        sleep(60)
if "coordinator.app" in sys.orig_argv:
    large = Large()
"""
"""A module whose one object takes long to free, in the coordinator's process."""


async def test_a_coordinator_that_python_would_clean_up_for_long_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(LARGE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.getcwd()]))
    async with Cluster(logs=tmp_path / "logs") as cluster:
        child = await cluster.start_coordinator("--listen", "127.0.0.1:0", "--state-dir", str(tmp_path / "state"))
    assert await child.wait() == 0  # it was not killed
    assert "stopping" in (tmp_path / "logs" / "coordinator.log").read_text()


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ("return None", 0, ""),
        ("return 3", 3, ""),
        ("raise SystemExit(4)", 4, ""),
        ("raise SystemExit('wrong')", 1, "wrong"),
        ("raise RuntimeError('broken')", 1, "RuntimeError: broken"),
    ],
)
def test_a_program_leaves_with_its_code_after_its_exit_handlers(ends: str, code: int, said: str) -> None:
    program = f"""
import atexit
from outrider.processes import leave_after
atexit.register(print, "handled")
def main():
    print("ended", end=" ")
    {ends}
leave_after(main)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ran.returncode, ran.stdout) == (code, "ended handled\n")
    assert said in ran.stderr
