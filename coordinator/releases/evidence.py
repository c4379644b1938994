"""Is the canary's draft worse than the one beside it? Answered while samples come in, errors bounded at every look.

A betting e-process for the difference of the means of bounded samples (Waudby-Smith and Ramdas, "Estimating means of
bounded random variables by betting", arXiv 2010.09686). Against "the mean is at most m", one stakes part of a capital
on each next sample x: the capital becomes capital * (1 + l (x - m)), with a stake l that only earlier samples decided.
If the claim is true, capital does not grow on average, so with probability 1 - alpha it never reaches 1 / alpha
(Ville): one may look after each sample and stop at will.

Two means are compared without knowing either. Whatever mean t the stable release has, the claim "the canary's is at
least t - bound" is bet against on both sides: the stable samples against "at most t", the canary's against "at least
t - bound". What the claim has left is the least capital over all t. For that, t goes through cells, each bet against
from the end at which the claim is weakest, so that nothing is lost between.

Samples are compared only with those of the same tenant and class, for these differ more than drafts do. Claims about
different strata are bet against with one capital, so their evidence multiplies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from coordinator.releases.records import Evidence, Rule, Sample

CELLS = 200
"""Of the stable release's mean: the bound is wider by no more than one of them, 0.005."""
STAKE = 0.8
"""Of the capital, what one sample may lose at most."""
ASIDE = 0.1
"""Of a tenant's capital, what is never staked: so no tenant's samples undo what the others' have shown."""
TAKING_PART = 8
"""Samples on both sides, from which on a tenant takes part."""
ONE_TENANT = 0.75
"""Of the evidence that decides, what one tenant's samples count for at most where several take part."""
CLASSES = 16
"""Of a tenant, told apart; further ones count as one."""
IN_DOUBT = 0.5
"""Of the evidence that decides: a class that looks so much worse holds up a promotion."""

_Values = npt.NDArray[np.float64]
_Stratum = tuple[str, str]
_EDGES = np.linspace(0.0, 1.0, CELLS + 1)


def weigh(samples: Sequence[Sample], rule: Rule) -> Evidence:
    """All the evidence there is. samples: in the order in which they were reported."""
    arms = _strata(samples)
    better = {stratum: _log_better(canary, stable, rule.bound) for stratum, (canary, stable) in arms.items()}
    worse = {stratum: _log_worse(canary, stable, rule.bound) for stratum, (canary, stable) in arms.items()}
    canary, stable = ([s.value for s in samples if s.canary is side] for side in (True, False))
    most = rule.needed * ONE_TENANT if _tenants(samples) > 1 else np.inf
    return Evidence(
        len(canary),
        len(stable),
        _mean(canary),
        _mean(stable),
        _together(better, most),
        _together(worse, most),
        _doubt(arms, worse, rule),
    )


def _strata(samples: Sequence[Sample]) -> dict[_Stratum, tuple[_Values, _Values]]:
    """(tenant, class) -> the canary's values and those beside it."""
    classes: dict[str, dict[str, str]] = {}
    found: dict[_Stratum, tuple[list[float], list[float]]] = {}
    for sample in samples:
        known = classes.setdefault(sample.tenant, {})
        named = known.setdefault(sample.traffic, sample.traffic if len(known) < CLASSES else "others")
        found.setdefault((sample.tenant, named), ([], []))[0 if sample.canary else 1].append(sample.value)
    return {stratum: (np.array(canary), np.array(stable)) for stratum, (canary, stable) in found.items()}


def _log_worse(canary: _Values, stable: _Values, bound: float) -> float:
    """Logarithm of the e-value against "the canary's mean is at least the other one less the bound"."""
    low, high = _EDGES[:-1], _EDGES[1:]
    return float(np.min(_log_capital(stable, high) + _log_capital(1.0 - canary, 1.0 - (low - bound))))


def _log_better(canary: _Values, stable: _Values, bound: float) -> float:
    """Against "the canary's mean is at most the other one less the bound", which is never below 0."""
    possible = _EDGES[1:] > bound
    low, high = _EDGES[:-1][possible], _EDGES[1:][possible]
    return float(np.min(_log_capital(1.0 - stable, 1.0 - low) + _log_capital(canary, high - bound)))


def _log_capital(values: _Values, means: _Values) -> _Values:
    """What betting against "the mean is at most m" has brought, for each m. [n] and [cells] -> [cells].

    The stake is the one that would have grown fastest so far, judged by mean and variance (the paper's aGRAPA), and
    nothing before the first sample.
    """
    n = len(values)
    if n == 0:
        return np.zeros_like(means)
    means = np.maximum(means, 1e-3)  # a stake is never endless
    before = np.arange(n, dtype=np.float64)
    total, squares = (np.concatenate(([0.0], np.cumsum(part)[:-1])) for part in (values, values**2))
    variance = (_VARIANCE + squares - total**2 / np.maximum(before, 1.0)) / (before + 1.0)
    lead = (total[:, None] - before[:, None] * means) / (before[:, None] + 1.0)
    stake = np.clip(lead / (variance[:, None] + lead**2), 0.0, STAKE / means)
    grown: _Values = np.log1p(stake * (values[:, None] - means)).sum(axis=0)
    return grown


_VARIANCE = 0.02
"""Of a share of right guesses over a stretch, before anything is known: a mixture of texts and chance."""


def _tenants(samples: Iterable[Sample]) -> int:
    """How many take part."""
    count: dict[str, list[int]] = {}
    for sample in samples:
        count.setdefault(sample.tenant, [0, 0])[sample.canary] += 1
    return sum(min(sides) >= TAKING_PART for sides in count.values())


def _together(logs: dict[_Stratum, float], most: float) -> float:
    """Over the classes of each tenant, then over the tenants."""
    by_tenant: dict[str, float] = {}
    for (tenant, _), log in logs.items():
        by_tenant[tenant] = by_tenant.get(tenant, 0.0) + log
    kept = (np.logaddexp(np.log(ASIDE), np.log1p(-ASIDE) + log) for log in by_tenant.values())
    return float(sum(min(log, most) for log in kept))


def _doubt(arms: dict[_Stratum, tuple[_Values, _Values]], worse: dict[_Stratum, float], rule: Rule) -> str:
    """The first class that is enough on both sides and seems worse than the bound allows, or that none is enough."""
    if not any(min(len(canary), len(stable)) >= TAKING_PART for canary, stable in arms.values()):
        return "too few samples"
    for stratum, (canary, stable) in arms.items():
        if min(len(canary), len(stable)) < TAKING_PART:
            continue
        if worse[stratum] >= IN_DOUBT * rule.needed or _mean(canary) < _mean(stable) - rule.bound:
            return f"class {stratum[1] or '(none)'} of tenant {stratum[0]}"
    return ""


def _mean(values: Sequence[float] | _Values) -> float:
    return float(np.mean(values)) if len(values) else 0.0
