"""Serve a target as a slower machine would: run `outrider-verifier`, with its options, around a paced engine.

    PACED_PASS_MS=30 PACED_ROW_MS=0.05 python -m benchmarks.support.paced_verifier --model DIR ...

The target's name says so. Passes are counted in the file that PACED_COUNTS names, if any.
"""

from __future__ import annotations

import sys

from benchmarks.support.pace import Pace
from cloud_verifier import app
from cloud_verifier.engine_process.ranks import RankProcesses


def main() -> None:
    RankProcesses.engine_module = "benchmarks.support.paced_engine"
    arguments = sys.argv[1:]
    app.main([*arguments, "--name", f"{app.parse(arguments).target_name}, {Pace.of_environment()}"])


if __name__ == "__main__":
    main()
