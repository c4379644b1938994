"""Run `outrider-verifier`, with its options, around the engine without a target."""

from __future__ import annotations

from cloud_verifier import app
from cloud_verifier.engine_process.ranks import RankProcesses

if __name__ == "__main__":
    RankProcesses.engine_module = "benchmarks.support.front_load.engine"
    app.main()
