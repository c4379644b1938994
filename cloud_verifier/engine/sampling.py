"""Choose the target's token from a row of logits, and return log-probabilities of tokens.

Sampling is greedy or coupled to the session's noise (docs/protocol.md, "Noise").
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
import torch

from outrider.core.constraint import Constraint
from outrider.core.coupling import position_key, session_key
from outrider.core.processors import Logits, TokenCounts, penalise, surviving_log_probs
from outrider.core.protocol.messages import TokenLogprobs
from outrider.core.sampling import SamplingParams, TypicalAcceptance
from outrider.core.target_token import Row, argmax, sampled_token, token_of
from outrider.core.verification import typical_child

LEAST_LOGPROB = -9999.0
"""Replaces the logarithm of 0, as in OpenAI's API; -inf would break a loss."""
SLICE_BYTES = 8 << 20
"""Size of the float32 logits that are turned into log-probabilities together."""
FEW = 1024
"""Most tokens that are looked at alone, without the rest of the row, where a grammar allows no others."""


class Sampler:
    """Chooses tokens for one session; the same logits at the same position always give the same token.

    key: of the session's noise; 0 if greedy. counts: of the tokens so far; empty without penalties.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        output: Sequence[int] = (),
        constraint: Constraint | None = None,
    ) -> None:
        """Begin after `output`. constraint: stands at the output's end, and is followed from there."""
        self.params = params
        self.constraint = constraint
        self.key = 0 if params.greedy else session_key(params.seed, prompt)
        self._penalised, self._filtered = params.penalised, params.filtered
        self.counts = TokenCounts(prompt, output) if self._penalised else TokenCounts()

    def choose(
        self, row: torch.Tensor | Row, position: int, path: Sequence[int], children: Collection[int] = ()
    ) -> int:
        """Return the token at a generated position; of equal scores the lowest id wins.

        row: logits `[V]` after the position's last ancestor; float32 if it is an array of numpy. path: tokens accepted
        in this step on the way to the row. children: tokens of the row's children, one of which typical acceptance may
        take instead of the target's own token. Raises InternalError if the logits are not finite, BadRequest if the
        constraint cannot be followed.
        """
        logits = self.penalised(row if isinstance(row, np.ndarray) else row.float().cpu().numpy(), path)
        own = self._own(logits, position, path)
        if self.params.typical is None or not children or own in children:
            return own
        typical = self._typical(logits.astype(np.float64, copy=False), position, path, children, self.params.typical)
        return own if typical is None else typical

    def penalised(self, logits: Row, path: Sequence[int]) -> Row:
        """Return logits `[V]` after penalties and bias, if there are any."""
        if not self._penalised:
            return logits
        return penalise(logits.astype(np.float64), self.params, self.counts, path)

    def _typical(
        self, logits: Logits, position: int, path: Sequence[int], children: Collection[int], rule: TypicalAcceptance
    ) -> int | None:
        """Return the child that typical acceptance takes; None if there is none. logits: `[V]`, after penalties."""
        if self.constraint is not None and self.constraint.binds(position):
            if self.constraint.forced(path):
                return None  # the only token
            logits = np.where(self.constraint.allowed(len(logits), position, path), logits, -np.inf)
        if self.params.greedy:
            ids = np.flatnonzero(logits > -np.inf)
            return typical_child(ids, logits[ids], children, rule)
        return typical_child(*surviving_log_probs(logits, self.params), children, rule)

    def _own(self, logits: Row, position: int, path: Sequence[int]) -> int:
        """Return the target's own token. logits: `[V]`, after penalties."""
        if self.constraint is None or not self.constraint.binds(position):
            return self._token(logits, position)
        if forced := self.constraint.forced(path):
            return forced[0]
        if not self._filtered:
            token = self._token(logits, position)
            if self.confirms(token, position, path):
                return token
        allowed = self.constraint.allowed(len(logits), position, path)
        if np.count_nonzero(allowed) > FEW:
            return self._token(np.where(allowed, logits, -np.inf), position)
        ids = np.flatnonzero(allowed)
        return token_of(ids, logits[ids], self.params, position_key(self.key, position))

    def masks(self, position: int) -> bool:
        """Return whether filters apply to allowed tokens alone, so that no choice among all tokens can be confirmed."""
        return self._filtered and self.constraint is not None and self.constraint.binds(position)

    def confirms(self, token: int, position: int, path: Sequence[int], children: Collection[int] = ()) -> bool:
        """Return whether the target's own token among all tokens is surely what `choose` returns.

        Typical acceptance may take a child instead, unless one has the token, which must also be the choice among what
        the constraint allows. Without filters an allowed token is the choice: the greatest of all scores is
        the greatest of any part that has it, so that no mask is needed. What filters leave depends on which tokens are
        forbidden. Raises BadRequest if the constraint cannot be followed.
        """
        if self.params.typical is not None and children and token not in children:
            return False
        if self.constraint is None or not self.constraint.binds(position):
            return True
        return not self._filtered and self.constraint.allows(token, position, path)

    def _token(self, logits: Row, position: int) -> int:
        if self.params.greedy:
            return argmax(logits)
        return sampled_token(logits, self.params, position_key(self.key, position))

    def commit(self, tokens: Sequence[int]) -> None:
        """Count tokens that were committed."""
        if self._penalised:
            self.counts.add(tokens)
        if self.constraint is not None:
            self.constraint.commit(tokens)


def top_logprobs(logits: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return ids `[n, K]` by falling probability, their log-probabilities `[n, K]`, and the logsumexp `[n, 1]`.

    logits: `[n, V]`; computed in float32. K is `top`, or V if that is less.
    """
    logits = logits.float()
    best, ids = logits.topk(min(top, logits.shape[1]), dim=1)
    total = logits.logsumexp(dim=1, keepdim=True)
    return ids, best - total, total


@torch.inference_mode()
def logprobs_of(logits: torch.Tensor, tokens: Sequence[int], top: int) -> tuple[TokenLogprobs, ...]:
    """Return the log-probability of each token by its own row, and those of the `top` likeliest tokens.

    logits: `[n, V]`, as the model returns them; computed in float32, slice by slice. Waits for the accelerator.
    """
    found: list[TokenLogprobs] = []
    count = max(1, SLICE_BYTES // (4 * logits.shape[1]))
    for part in (slice(first, first + count) for first in range(0, len(tokens), count)):
        values = logits[part].float()
        own = values.gather(1, torch.tensor(list(tokens[part]), device=logits.device).unsqueeze(1))
        ids, best, total = top_logprobs(values, top)
        log_probs = torch.cat([own - total, best], dim=1).clamp(LEAST_LOGPROB, 0.0)
        found += (
            TokenLogprobs(own_log_prob, tuple(zip(alternatives, others, strict=True)))
            for (own_log_prob, *others), alternatives in zip(log_probs.tolist(), ids.tolist(), strict=True)
        )
    return tuple(found)
