"""Test that a program ends with its code after its exit handlers, without the time that Python's cleanup takes."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("ends", "code", "said"),
    [
        ("return 3", 3, ""),
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
