"""Run the engine process of a throttled verifier. Nothing is held up before the check at its start has passed."""

from __future__ import annotations

import os
import time

import torch

from cloud_verifier.engine.torch_backend.batch import PackedBatch
from cloud_verifier.engine.torch_backend.kernels.attention import AttentionPlan
from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine_process.main import main


def throttle(step_s: float, token_s: float) -> None:
    """Throttle every target of this process."""
    forward = TargetModel.forward

    def throttled(model: TargetModel, batch: PackedBatch, plan: AttentionPlan) -> torch.Tensor:
        ends = time.perf_counter() + step_s + token_s * batch.input_ids.shape[-1]
        logits = forward(model, batch, plan)
        reads = any(segment.chain > 1 for segment in batch.segments)
        if model.deviation is not None and not reads:
            time.sleep(max(0.0, ends - time.perf_counter()))
        return logits

    TargetModel.forward = throttled  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    throttle(float(os.environ["THROTTLED_STEP_MS"]) / 1e3, float(os.environ["THROTTLED_TOKEN_MS"]) / 1e3)
    main()
