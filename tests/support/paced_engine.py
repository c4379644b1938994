"""Run the engine process of `paced_verifier`. Nothing is held up before the check at start has passed."""

from __future__ import annotations

import os
import time

from cloud_verifier.engine.torch_backend.model import TargetModel
from cloud_verifier.engine_process.main import main

PACE_S = float(os.environ["PACED_MS"]) / 1e3
forward = TargetModel.forward


def paced(model, *arguments):
    ends = time.perf_counter() + PACE_S
    logits = forward(model, *arguments)
    if model.deviation is not None:
        time.sleep(max(0.0, ends - time.perf_counter()))
    return logits


if __name__ == "__main__":
    TargetModel.forward = paced
    main()
