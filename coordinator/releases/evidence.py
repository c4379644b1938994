"""Test while samples come in whether a canary's draft is worse than the one beside it.

It is Wald's sequential probability ratio test (A. Wald, "Sequential tests of statistical hypotheses", Annals of
Mathematical Statistics 16, 1945) on the difference d of two proportions: of the tokens that devices proposed first,
those that were accepted. A sample is one session's proportion with one draft, since the tokens of one text are alike.
With the variance v of the observed difference d, the likelihood ratio of "no difference" against "worse by the bound b"
is

    exp(b / v * (d + b / 2))

(the score statistic d / v grows like a Brownian motion in 1 / v: C. Jennison and B. Turnbull, "Group Sequential
Methods", 2000, chapter 3). If the draft is worse by b or more this ratio is 1 on average at most, so it ever reaches
1 / ALPHA with a probability of ALPHA at most (Ville's inequality), however often one looks. So, up to the normal
approximation and the variance that is estimated:

    a draft that is worse by b or more becomes stable                with a probability of at most ALPHA
    a draft that is as good as the other one, or better, is rolled back with a probability of at most ALPHA

A draft that is worse by less than b may end either way. Simulated trials of 600 samples, which
tests/coordinator/test_release_evidence.py has, were wrong in 0.1 to 0.7% of the cases.

Samples are compared only with those of the same tenant, for tenants differ more than drafts do, and all that is known
of a tenant is what its own devices make of its texts: it may lie. So each tenant has a ratio of its own. From each
only a part is taken, so that what one tenant says against the others divides their product by 1 / RESERVE at most. And
the tenants that show the most for a decision are left out of it: if no more of them lie, the product of the others is
at most that of the honest ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from coordinator.releases.records import CanaryEvidence

ALPHA = 0.01
"""Probability of a wrong decision, at most."""
LOG_THRESHOLD = math.log(1.0 / ALPHA)
"""Logarithm of the likelihood ratio that decides."""
LEAST = 8
"""Samples on either side from which on a tenant takes part."""
PRIOR_SAMPLES = 4
"""Samples that are supposed to have come before the first one, for the variance of few samples."""
PRIOR_VARIANCE = 0.03
"""Variance of a sample that is supposed before the first: acceptances vary by text and by chance."""
RESERVE = 0.1
"""Part of a tenant's ratio that stays 1, so that no tenant's samples undo what the others' have shown."""


class Arm(NamedTuple):
    """The samples of one tenant on one side of a trial."""

    samples: int = 0
    total: float = 0.0
    """Sum of the samples' acceptances, each from 0 to 1."""
    squares: float = 0.0
    """Sum of their squares."""

    @property
    def mean(self) -> float:
        return self.total / max(1, self.samples)

    @property
    def variance_of_mean(self) -> float:
        """Return the variance of the mean, about what is supposed for a single sample while there are few."""
        around_mean = max(0.0, self.squares - self.total * self.mean)
        return (PRIOR_SAMPLES * PRIOR_VARIANCE + around_mean) / (PRIOR_SAMPLES + self.samples) / max(1, self.samples)


class Arms(NamedTuple):
    """The samples of one tenant."""

    canary: Arm = Arm()
    stable: Arm = Arm()

    @property
    def takes_part(self) -> bool:
        return min(self.canary.samples, self.stable.samples) >= LEAST

    def log_ratio(self, bound: float) -> float:
        """Return the logarithm of the likelihood ratio of "no difference" against "worse by the bound"."""
        if not self.takes_part:
            return 0.0
        difference = self.canary.mean - self.stable.mean
        variance = self.canary.variance_of_mean + self.stable.variance_of_mean
        return bound / variance * (difference + bound / 2.0)


def weigh(tenants: Mapping[str, Arms], bound: float, needed: int) -> CanaryEvidence:
    """Return the evidence of all samples, by tenant.

    needed: tenants that must take part before it decides, since some may lie; 1 trusts every tenant.
    """
    ratios = [arms.log_ratio(bound) for arms in tenants.values()]
    # All tenants with samples: if only those with enough samples counted, the first ones there could all be liars.
    liars = may_lie(len(tenants)) if needed > 1 else 0
    canary, stable = (_sum([arms[side] for arms in tenants.values()]) for side in (0, 1))
    return CanaryEvidence(
        canary_samples=canary.samples,
        stable_samples=stable.samples,
        canary_acceptance=canary.mean,
        stable_acceptance=stable.mean,
        log_better=_combined(ratios, liars),
        log_worse=_combined([-ratio for ratio in ratios], liars),
        tenants=sum(arms.takes_part for arms in tenants.values()),
        tenants_needed=needed,
    )


def may_lie(tenants: int) -> int:
    """Return how many of so many tenants may lie without deciding anything: one of several, or less than a quarter.

    Each costs the evidence of an honest tenant, so that with more of them trials would often end undecided.
    """
    return max(1, (tenants - 1) // 4) if tenants > 1 else 0


def _combined(ratios: list[float], liars: int) -> float:
    """Return the logarithm of the tenants' ratios together, without the `liars` greatest."""
    kept = sorted(ratios)[: max(0, len(ratios) - liars)]
    return sum(_with_reserve(ratio) for ratio in kept)


def _with_reserve(log_ratio: float) -> float:
    """Return log(RESERVE + (1 - RESERVE) * ratio)."""
    if log_ratio > 0.0:
        return log_ratio + math.log(1.0 - RESERVE + RESERVE * math.exp(-log_ratio))
    return math.log(RESERVE + (1.0 - RESERVE) * math.exp(log_ratio))


def _sum(arms: list[Arm]) -> Arm:
    return Arm(sum(a.samples for a in arms), sum(a.total for a in arms), sum(a.squares for a in arms))
