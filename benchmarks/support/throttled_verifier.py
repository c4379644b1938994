"""Run `outrider-verifier` with a throttled target: a forward pass of n tokens takes at least STEP_MS + TOKEN_MS * n.

So a small target on a CPU keeps the step times of a large one on an accelerator. Everything else is the product's own.
Passes that read prompts take their own time: an accelerator reads hundreds of tokens in about the time of one.
"""

from __future__ import annotations

import sys

MODULE = "benchmarks.support.throttled_verifier"
"""For `Cluster.verifier_module`."""


def environment(step_ms: float, token_ms: float = 0.0) -> dict[str, str]:
    """Return the variables that throttle the targets of a cluster's verifiers."""
    return {"THROTTLED_STEP_MS": str(step_ms), "THROTTLED_TOKEN_MS": str(token_ms)}


if __name__ == "__main__":
    from cloud_verifier import app
    from cloud_verifier.engine_process import launcher

    launcher.ENGINE_MODULE = "benchmarks.support.throttled_engine"
    app.main(sys.argv[1:])
