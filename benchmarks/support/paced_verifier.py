"""Serve a target as a slower machine would: run `outrider-verifier`, with its options, around a paced engine.

    PACED_PASS_MS=30 PACED_ROW_MS=0.05 python -m benchmarks.support.paced_verifier --model DIR ...

The target's name says so. Passes are counted in the file that PACED_COUNTS names, if any. Both engines may be paced.
"""

from __future__ import annotations

import sys

import benchmarks
from benchmarks.support.pace import Pace
from cloud_verifier import app
from cloud_verifier.engine_process.launcher import EngineLauncher

ENGINES = {"torch": "benchmarks.support.paced_engine", "vllm": "benchmarks.support.paced_vllm_engine"}
"""Engine -> the module of its process."""


def main() -> None:
    arguments = sys.argv[1:]
    config = app.parse(arguments)
    EngineLauncher.engine_module = ENGINES[config.engine]
    EngineLauncher.packages += (benchmarks,)
    app.main([*arguments, "--name", f"{config.target_name}, {Pace.of_environment()}"])


if __name__ == "__main__":
    main()
