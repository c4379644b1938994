"""Run the engine process of a paced verifier: the product's own, with slower forward passes.

Nothing is held up before the numerics check has passed; what steps cost is measured with the pace. For devices that
draft in rounds it also waits for their nodes as long as their directive says, where the product waits only if that
gains more than a step without them.
"""

from __future__ import annotations

import os

import torch

from benchmarks.support.pace import WAITS, Pace, PassCounts, hold
from cloud_verifier.engine import scheduler
from cloud_verifier.engine.torch_backend.batch import PackedBatch
from cloud_verifier.engine.torch_backend.kernels.attention import AttentionPlan
from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine_process.main import main


def pace_targets(pace: Pace, counts: PassCounts) -> None:
    """Pace every target of this process that has passed its numerics check."""
    forward = TargetModel.forward

    def paced(model: TargetModel, batch: PackedBatch, plan: AttentionPlan) -> torch.Tensor:
        if model.deviation is None:
            return forward(model, batch, plan)
        reads = any(segment.chain > 1 for segment in batch.segments)
        with hold(pace, counts, batch.input_ids.shape[-1], reads=reads):
            return forward(model, batch, plan)

    TargetModel.forward = paced  # type: ignore[method-assign,assignment]


if __name__ == "__main__":
    pace_targets(Pace.of_environment(), PassCounts.of_environment())
    if os.environ.get(WAITS):
        scheduler.WAIT_GAIN = 0.0
    main()
