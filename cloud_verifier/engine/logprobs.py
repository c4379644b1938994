"""What the target thought of the tokens that a step commits, for the sessions that ask."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.core.protocol.messages import TokenLogprobs

LEAST = -9999.0
"""In place of the logarithm of 0, as OpenAI has it."""


def likeliest(logits: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids `[n, K]`, the likeliest first, their log-probabilities, and the logarithm `[n, 1]` of the sum of all exps.

    logits: `[n, V]`; computed in float32. K is `top`, or V where that is less.
    """
    logits = logits.float()
    best, ids = logits.topk(min(top, logits.shape[1]), dim=1)
    total = logits.logsumexp(dim=1, keepdim=True)
    return ids, best - total, total


@torch.inference_mode()
def logprobs_of(
    logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], top: int
) -> tuple[TokenLogprobs, ...]:
    """Of each token, by the row that gave it; with the `top` likeliest, or the whole vocabulary where that is less.

    logits: `[R, V]`, as the model gives them. Waits for the accelerator; computed in float32 and copied at once.
    """
    chosen = torch.tensor(list(rows), device=logits.device)
    values = logits.index_select(0, chosen).float()
    own = values.gather(1, torch.tensor(list(tokens), device=logits.device).unsqueeze(1))
    ids, best, total = likeliest(values, top)
    log_probs = torch.cat([own - total, best], dim=1).clamp(LEAST, 0.0)
    return tuple(
        TokenLogprobs(first, tuple(zip(alternatives, rest, strict=True)))
        for (first, *rest), alternatives in zip(log_probs.tolist(), ids.tolist(), strict=True)
    )
