"""The target's token for one row of logits: greedy, or coupled to the session's noise (docs/protocol.md, "Noise")."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.core.counts import TokenCounts
from outrider.core.coupling import gumbel, position_key, session_key
from outrider.core.errors import InternalError
from outrider.core.processors import penalise, surviving_log_probs
from outrider.core.sampling import SamplingParams


class Sampler:
    """Chooses tokens for one session; the same logits at the same position always give the same token."""

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._params = params
        self.key = 0 if params.greedy else session_key(params.seed, prompt)

    def choose(self, row: torch.Tensor, position: int, counts: TokenCounts, path: Sequence[int]) -> int:
        """The token at a generated position; equal scores go to the lowest id.

        row: logits `[V]` after the position's last ancestor. counts: tokens of prompt and output so far.
        path: tokens accepted in this step on the way to the row. Raises InternalError where the logits are no numbers.
        """
        logits: NDArray[np.float32] = row.float().cpu().numpy()
        if self._params.greedy and not self._params.penalised:
            return _best(logits)
        scores = penalise(logits.astype(np.float64), self._params, counts, path)
        if self._params.greedy:
            return _best(scores)
        # Noise only for what the filters left. NaN stays in, to be found.
        ids, scores = surviving_log_probs(scores, self._params)
        noisy = scores + gumbel(position_key(self.key, position), ids)
        return int(ids[_best(noisy)])


def _best(scores: NDArray[np.float32] | NDArray[np.float64]) -> int:
    """argmax, which finds a NaN first of all."""
    best = int(scores.argmax()) if len(scores) else -1
    if best < 0 or not np.isfinite(scores[best]):
        raise InternalError("the target's logits are not finite")
    return best
