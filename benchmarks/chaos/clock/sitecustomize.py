"""Shift this process's wall clock by the seconds in the file that CHAOS_CLOCK names.

Python imports this module at its start where its folder is on PYTHONPATH. The file is read at every call, so that the
clock can jump while the process runs.
"""

import os
import time

_FILE = os.environ.get("CHAOS_CLOCK")

if _FILE:
    _real = time.time

    def _shifted() -> float:
        try:
            with open(_FILE) as file:
                return _real() + float(file.read() or 0.0)
        except (OSError, ValueError):
            return _real()

    time.time = _shifted
    time.time_ns = lambda: int(_shifted() * 1e9)
