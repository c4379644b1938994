"""Read what /proc says about processes."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def cpu_seconds(pid: int) -> float:
    """Return the user and system time of a process with all its threads; 0 if it is gone."""
    with contextlib.suppress(OSError):
        fields = _stat(pid)
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def rss_mb(pid: int) -> float:
    """Return the resident memory of a process in MB; 0 if it is gone."""
    with contextlib.suppress(OSError):
        return int(Path("/proc", str(pid), "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    return 0.0


def family(pid: int) -> list[int]:
    """Return the process, first, and all that descend from it."""
    by_parent: dict[int, list[int]] = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            by_parent.setdefault(int(_stat(int(entry))[1]), []).append(int(entry))
    found = [pid]
    for one in found:
        found += by_parent.get(one, [])
    return found


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on: the name before them may hold anything."""
    return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()
