"""Run `outrider-verifier` around an engine whose forward passes take at least PACED_MS milliseconds each.

Texts of the small target then last long enough for a test to interrupt them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from cloud_verifier import app
from cloud_verifier.engine_process.launcher import EngineLauncher

NAME = Path(__file__).stem


def environment(ms: float) -> dict[str, str]:
    """Return the variables with which `python -m paced_verifier` finds this folder and its pace."""
    folders = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return {"PACED_MS": str(ms), "PYTHONPATH": os.pathsep.join(filter(None, folders))}


if __name__ == "__main__":
    EngineLauncher.engine_module = "paced_engine"
    app.main(sys.argv[1:])
