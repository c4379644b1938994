"""Shift this process's wall clock by the seconds in the file that CHAOS_CLOCK names.

Python imports this module at its start where its folder is on PYTHONPATH. The file is read at every call, so that the
clock can jump while the process runs. gRPC's Python code reads the right time: it makes deadlines of it, for a core
whose clock is not shifted, while a clock that is wrong is wrong for both.
"""

import os
import sys
import time

_FILE = os.environ.get("CHAOS_CLOCK", "")

if _FILE:
    _real = time.time

    def _shifted() -> float:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("grpc"):
            return _real()
        try:
            with open(_FILE) as file:
                return _real() + float(file.read() or 0.0)
        except (OSError, ValueError):
            return _real()

    time.time = _shifted
    time.time_ns = lambda: int(time.time() * 1e9)
