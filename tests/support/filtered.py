"""Lay the log-probabilities that sampling filters leave out over the whole vocabulary, as references compare them."""

from __future__ import annotations

import numpy as np

from outrider.core.processors import Logits, surviving_log_probs
from outrider.core.sampling import SamplingParams


def filtered_log_probs(logits: Logits, params: SamplingParams) -> Logits:
    """Return log p `[V]` after temperature, top-k, top-p and min-p, not renormalised; -inf for dropped tokens."""
    ids, kept = surviving_log_probs(logits, params)
    out = np.full(logits.shape[0], -np.inf)
    out[ids] = kept
    return out
