"""Test while samples come in whether a canary's draft is worse than the one beside it.

It is Wald's sequential probability ratio test ("Sequential tests of statistical hypotheses", Annals of Mathematical
Statistics 16, 1945) on the difference d of two proportions: of the tokens that devices proposed first, those that were
accepted. A sample is one session's proportion with one draft, since the tokens of one text are alike. With the variance
v of d, the likelihood ratio of "no difference" against "worse by the bound b" is

    exp(b / v * (d + b / 2))

(C. Jennison and B. Turnbull, "Group Sequential Methods", 2000, chapter 3). If the draft is worse by b, the ratio is 1
on average at most, so it ever reaches 1 / ALPHA with a probability of ALPHA at most (Ville's inequality), however often
one looks; and so for a draft that is as good, with the inverse. One that is worse by less than b may end either way.

Samples are compared only with those of the same tenant, for tenants differ more than drafts do, and any of them may
lie. So each has a ratio of its own, of which a part (RESERVE) stays 1, and those that show the most for a decision are
left out of it: if no more of them lie, the product of the others is at most that of the honest ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from outrider.wire.v1 import coordinator_pb2 as pb

BOUND = 0.05
"""A canary whose acceptance is worse by this much, from 0 to 1, is rolled back; one that is as good as the release
beside it becomes stable; one between may do either."""
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
        """Return the variance of the mean; a sample's is drawn towards PRIOR_VARIANCE while there are few."""
        around_mean = max(0.0, self.squares - self.total * self.mean)
        return (PRIOR_SAMPLES * PRIOR_VARIANCE + around_mean) / (PRIOR_SAMPLES + self.samples) / max(1, self.samples)


class Arms(NamedTuple):
    """The samples of one tenant."""

    canary: Arm = Arm()
    stable: Arm = Arm()

    @property
    def takes_part(self) -> bool:
        return min(self.canary.samples, self.stable.samples) >= LEAST

    @property
    def log_ratio(self) -> float:
        """Return the logarithm of the likelihood ratio of "no difference" against "worse by the bound"."""
        if not self.takes_part:
            return 0.0
        difference = self.canary.mean - self.stable.mean
        return BOUND / (self.canary.variance_of_mean + self.stable.variance_of_mean) * (difference + BOUND / 2.0)


def weigh(tenants: Mapping[str, Arms], needed: int) -> pb.ReleaseEvidence:
    """Return the evidence of all samples, by tenant.

    needed: tenants that must take part before it decides, since some may lie; 1 trusts every tenant.
    """
    ratios = sorted(arms.log_ratio for arms in tenants.values())
    # Less than a quarter of the tenants are taken to lie, but at least one: as many extreme ratios are left out. All
    # with samples count, since the first that have enough could all be liars.
    liars = max(1, (len(ratios) - 1) // 4) if needed > 1 and len(ratios) > 1 else 0
    canary, stable = _sum([arms.canary for arms in tenants.values()]), _sum([arms.stable for arms in tenants.values()])
    return pb.ReleaseEvidence(
        canary_samples=canary.samples,
        stable_samples=stable.samples,
        canary_acceptance=canary.mean,
        stable_acceptance=stable.mean,
        log_better=sum(map(_with_reserve, ratios[: len(ratios) - liars])),
        log_worse=sum(_with_reserve(-ratio) for ratio in ratios[liars:]),
        tenants=sum(arms.takes_part for arms in tenants.values()),
        tenants_needed=needed,
    )


def _with_reserve(log_ratio: float) -> float:
    """Return log(RESERVE + (1 - RESERVE) * ratio)."""
    if log_ratio > 0.0:
        return log_ratio + math.log(1.0 - RESERVE + RESERVE * math.exp(-log_ratio))
    return math.log(RESERVE + (1.0 - RESERVE) * math.exp(log_ratio))


def _sum(arms: list[Arm]) -> Arm:
    return Arm(sum(a.samples for a in arms), sum(a.total for a in arms), sum(a.squares for a in arms))
