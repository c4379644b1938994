"""Compare sequences of tokens with the distribution that they should have, by chi-square."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from scipy import stats

Prefix = tuple[int, ...]


def joint(after: Callable[[Prefix], np.ndarray], length: int) -> dict[Prefix, float]:
    """Return the probability of every possible sequence of `length` tokens. after: prefix -> p of the next `[V]`."""
    found: dict[Prefix, float] = {(): 1.0}
    for _ in range(length):
        found = {
            (*prefix, int(token)): before * float(after(prefix)[token])
            for prefix, before in found.items()
            for token in np.flatnonzero(after(prefix))
        }
    return found


def p_value(drawn: Sequence[Prefix], probabilities: Mapping[Prefix, float]) -> float:
    """Return the p-value of what was drawn; those that are expected less than five times count as one.

    It is 0 if something was drawn that has no probability.
    """
    counted = Counter(drawn)
    if counted.keys() - probabilities.keys():
        return 0.0
    observed = np.array([counted[one] for one in probabilities], dtype=float)
    expected = len(drawn) * np.array(list(probabilities.values()))
    rare = expected < 5
    if rare.any():
        observed, expected = (np.append(values[~rare], values[rare].sum()) for values in (observed, expected))
    return float(stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue)
