"""Test that freed memory goes back to the system, even if something small stays beside it."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

from outrider.processes import trim_freed_memory

FREED = """
import os
import sys
from pathlib import Path

from outrider.processes import trim_freed_memory

def rss_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


if sys.argv[1] == "given back":
    assert trim_freed_memory()
large = b"x" * (1 << 20)
del large
before = rss_mb()
blocks, pins = [], []
for _ in range(200):
    blocks.append(b"x" * (1 << 18))
    pins.append(b"x" * 20_000)
blocks.clear()
print(rss_mb() - before)
"""


def kept_mb(how: str) -> float:
    ran = subprocess.run([sys.executable, "-c", FREED, how], capture_output=True, text=True, check=True)
    return float(ran.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_large_blocks_go_back_to_the_system_though_small_ones_lie_between_them() -> None:
    assert kept_mb("given back") < 10.0
    assert kept_mb("as it is") > 40.0, (
        "glibc keeps nothing by itself any more: outrider.processes.trim_freed_memory is not needed"
    )


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert not trim_freed_memory()
