"""Test while samples come in whether a canary's draft is worse than the one beside it, with errors bounded at any time.

A betting e-process for the mean of bounded differences (Waudby-Smith and Ramdas, "Estimating means of bounded random
variables by betting", arXiv 2010.09686). Against "the mean is at most 0", one stakes part of a capital on each next
value g: the capital becomes capital * (1 + l g), with a stake l that only earlier values decided. If the claim is true
of each value, given those before, capital does not grow on average, so with probability 1 - alpha it never reaches
1 / alpha (Ville): one may look after each value and stop at will.

Traffic changes while a trial runs, and its two sides do not come evenly: stable sessions are there at once, while the
canary's devices still download. So samples are compared only with those of their own time: each forms a group with the
nearest ones of the other side, a sample without any is left out, and the bets are on the difference within a group.
What makes texts harder or easier for both drafts at once moves only the few groups that it cuts in two.

Samples are compared only with those of the same tenant and class, for these differ more than drafts do. All that is
known of them is what a tenant's own devices say, and a tenant may lie. So each tenant has a capital of its own, an
e-value, and of all tenants the f with the greatest capitals are left out. If at most f lie, the k-th greatest of those
that remain is at most the k-th greatest of the honest ones. Their product, which decides, is then below 1 or at most
the product of the honest ones, which is an e-value itself, since tenants are independent (Vovk and Wang, "E-values:
calibration, combination and applications", arXiv 1912.06116).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

import numpy as np
import numpy.typing as npt

from coordinator.releases.records import AcceptanceSample, CanaryEvidence, CanaryPolicy

NEAREST = 3
"""Samples of one side in a group at most: as many as a canary's share of a quarter leaves to each."""
NEAR_S = 300.0
"""Seconds between the samples of a group at most: traffic is taken for the same within that time."""
STAKE = 0.9
"""Greatest part of the capital that one group may lose."""
PRIOR_GROUPS = 4
"""Groups without a difference that are supposed to have come before the first one."""
PRIOR_VARIANCE = 0.03
"""Variance of a group's difference that is supposed before the first: acceptances vary by text and by chance."""
RESERVE = 0.1
"""Part of a tenant's capital that is never staked, so that no tenant's samples undo what the others' have shown."""
MIN_GROUPS = 8
"""Groups from which on a tenant takes part, and a class can be in doubt."""
CLASSES = 16
"""Classes of a tenant that are distinguished; further ones count as one."""
IN_DOUBT = 0.5
"""Part of the deciding evidence with which a class that looks worse holds up a promotion."""

_Values = npt.NDArray[np.float64]
_Stratum = tuple[str, str]
"""Tenant and traffic class."""


class _Groups:
    """The groups of one stratum, formed as its samples come. Samples of only one side can be waiting."""

    def __init__(self) -> None:
        self._waiting: list[AcceptanceSample] = []  # of one side, the latest last
        self.canary: list[float] = []
        """Mean acceptance of the canary's samples in each group."""
        self.stable: list[float] = []
        """Mean acceptance of the other side's samples in each group."""
        self.samples = [0, 0]
        """Samples in groups: of the stable side, of the canary."""

    def add(self, sample: AcceptanceSample) -> None:
        """Add a sample. Sides and times alone decide its group, never the acceptances: so bets stay fair."""
        self._waiting = [s for s in self._waiting if sample.at_s - s.at_s <= NEAR_S]
        if not self._waiting or self._waiting[0].canary is sample.canary:
            self._waiting = [*self._waiting, sample][-NEAREST:]
            return
        beside = _mean([s.acceptance for s in self._waiting])
        self.samples[sample.canary] += 1
        self.samples[not sample.canary] += len(self._waiting)
        self.canary.append(sample.acceptance if sample.canary else beside)
        self.stable.append(beside if sample.canary else sample.acceptance)
        self._waiting = []

    @property
    def differences(self) -> _Values:
        """Return the canary's acceptance less the other side's in each group, from -1 to 1."""
        values: _Values = np.array(self.canary) - np.array(self.stable)
        return values


def weigh(samples: Sequence[AcceptanceSample], policy: CanaryPolicy) -> CanaryEvidence:
    """Return the evidence of all samples, which are in the order in which they were reported."""
    strata, bound = _strata(samples), policy.bound
    differences = {stratum: groups.differences for stratum, groups in strata.items()}
    better = {stratum: _log_capital(d + bound, bound, 1.0 - bound) for stratum, d in differences.items()}
    worse = {stratum: _log_capital(-d - bound, -bound, 1.0 + bound) for stratum, d in differences.items()}
    # All tenants with samples: if only those with enough groups counted, the first ones there could all be liars.
    liars = may_lie(len({tenant for tenant, _ in strata})) if policy.tenants > 1 else 0
    return CanaryEvidence(
        canary_samples=sum(groups.samples[True] for groups in strata.values()),
        stable_samples=sum(groups.samples[False] for groups in strata.values()),
        canary_acceptance=_mean([value for groups in strata.values() for value in groups.canary]),
        stable_acceptance=_mean([value for groups in strata.values() for value in groups.stable]),
        log_better=_combined(better, liars),
        log_worse=_combined(worse, liars),
        doubt=_doubt(differences, worse, liars, policy),
        tenants=_taking_part(differences),
    )


def may_lie(tenants: int) -> int:
    """Return how many of so many tenants may lie without deciding anything: one of several, or less than a quarter.

    Each costs the evidence of an honest tenant, so that with more of them trials would often end undecided.
    """
    return max(1, (tenants - 1) // 4) if tenants > 1 else 0


def _strata(samples: Sequence[AcceptanceSample]) -> dict[_Stratum, _Groups]:
    classes: dict[str, dict[str, str]] = {}
    found: dict[_Stratum, _Groups] = {}
    for sample in samples:
        known = classes.setdefault(sample.tenant, {})
        named = known.setdefault(sample.traffic, sample.traffic if len(known) < CLASSES else "others")
        found.setdefault((sample.tenant, named), _Groups()).add(sample)
    return found


def _log_capital(gains: _Values, even: float, loss: float) -> float:
    """Return the logarithm of what betting against "the mean is at most 0" has brought.

    gains: in [-loss, ..]; even: the gain of a group without a difference. The stake is the one that would have grown
    fastest so far, judged by mean and variance (the paper's aGRAPA).
    """
    if not len(gains):
        return 0.0
    before = PRIOR_GROUPS + np.arange(len(gains), dtype=np.float64)
    total, squares = (np.concatenate(([0.0], np.cumsum(part)[:-1])) for part in (gains - even, (gains - even) ** 2))
    drift = total / before
    variance = np.maximum((PRIOR_GROUPS * PRIOR_VARIANCE + squares) / before - drift**2, 1e-3)
    lead = even + drift
    stake = np.clip(lead / (variance + lead**2), 0.0, STAKE / loss)
    return float(np.log1p(stake * gains).sum())


def _taking_part(differences: Mapping[_Stratum, _Values]) -> int:
    """Return the number of tenants that have enough groups."""
    groups = Counter(tenant for (tenant, _), values in differences.items() for _ in values)
    return sum(count >= MIN_GROUPS for count in groups.values())


def _combined(logs: Mapping[_Stratum, float], liars: int) -> float:
    """Return the evidence over the classes of each tenant, and then over the tenants but the `liars` that show most."""
    by_tenant: defaultdict[str, float] = defaultdict(float)
    for (tenant, _), log in logs.items():
        by_tenant[tenant] += log
    kept = sorted(by_tenant.values())[: max(0, len(by_tenant) - liars)]
    return float(sum(np.logaddexp(np.log(RESERVE), np.log1p(-RESERVE) + log) for log in kept))


def _doubt(
    differences: Mapping[_Stratum, _Values], worse: Mapping[_Stratum, float], liars: int, policy: CanaryPolicy
) -> str:
    """Return a class that looks worse than the bound, if more than `liars` tenants have one, or that none is known."""
    found: dict[str, str] = {}
    enough = {stratum: values for stratum, values in differences.items() if len(values) >= MIN_GROUPS}
    for (tenant, traffic), values in enough.items():
        by_chance = float(np.std(values)) / len(values) ** 0.5  # among many classes some look worse
        convinced = worse[tenant, traffic] >= IN_DOUBT * policy.log_threshold
        if convinced or _mean(values) + by_chance < -policy.bound:
            found.setdefault(tenant, f"class {traffic or '(none)'} of tenant {tenant}")
    if not enough:
        return "too few samples"
    if len(found) <= liars:
        return ""
    first = next(iter(found.values()))
    return first if len(found) == 1 else f"{first}, and classes of {len(found) - 1} other tenants"


def _mean(values: Sequence[float] | _Values) -> float:
    return fmean(values) if len(values) else 0.0
