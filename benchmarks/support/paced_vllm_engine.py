"""Run the engine process of a paced verifier whose target vLLM runs: the product's own, with slower forward passes.

As in `paced_engine`, nothing is held up before the check at start has passed, and what steps cost is measured with the
pace. A pass is vLLM's preparation of its inputs and the forward, without sampling. Runs in vLLM's interpreter.
"""

from __future__ import annotations

import os
from typing import Any

from cloud_verifier.engine.vllm_backend import ENVIRONMENT

os.environ.update(ENVIRONMENT | os.environ)  # vLLM reads it when it is imported

from benchmarks.support.pace import Pace, PassCounts, hold
from cloud_verifier.engine.vllm_backend import load
from cloud_verifier.engine.vllm_backend.worker import CoupledWorker
from cloud_verifier.engine_process.main import main


def pace_workers(pace: Pace, counts: PassCounts) -> None:
    """Pace the passes of every target of this process once its outputs have been checked."""
    execute, check = CoupledWorker.execute_model, load.check_outputs
    checked = False

    def checking(*arguments: Any, **options: Any) -> int:
        nonlocal checked
        equal = check(*arguments, **options)
        checked = True
        return equal

    def paced(worker: CoupledWorker, output: Any) -> Any:
        rows = output.num_scheduled_tokens
        if not (checked and rows):
            return execute(worker, output)
        drafts = output.scheduled_spec_decode_tokens
        reads = any(count > 1 + len(drafts.get(request, ())) for request, count in rows.items())
        with hold(pace, counts, sum(rows.values()), reads=reads):
            return execute(worker, output)

    load.check_outputs = checking
    CoupledWorker.execute_model = paced  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    pace_workers(Pace.of_environment(), PassCounts.of_environment())
    main()
