"""Is the canary's draft worse than the one beside it? Answered while samples come in, errors bounded at every look.

A betting e-process for the mean of bounded differences (Waudby-Smith and Ramdas, "Estimating means of bounded random
variables by betting", arXiv 2010.09686). Against "the mean is at most 0", one stakes part of a capital on each next
value g: the capital becomes capital * (1 + l g), with a stake l that only earlier values decided. If the claim is true
of each value, given those before, capital does not grow on average, so with probability 1 - alpha it never reaches
1 / alpha (Ville): one may look after each value and stop at will.

Traffic changes while a trial runs, and its two sides do not come evenly: stable sessions are there at once, while the
canary's devices still download. So samples are compared only with those of their own time: each forms a group with the
nearest ones of the other side, what finds none is left out, and the difference within a group is what is bet on. What
makes texts harder or easier for both drafts at once moves only the differences of the few groups that it cuts in two.

Samples are compared only with those of the same tenant and class, for these differ more than drafts do. Claims about
different strata are bet against with one capital, so their evidence multiplies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from coordinator.releases.records import Evidence, Rule, Sample

NEAREST = 3
"""Samples of one side that stand in a group at most: as many as a canary's share of a quarter leaves to each."""
NEAR_S = 300.0
"""Between the samples of a group, at most: traffic is taken for the same so long."""
STAKE = 0.9
"""Of the capital, what one group may lose at most."""
GUESSES = 4
"""As many groups without a difference are supposed to have been before the first one, of which is also the next."""
VARIANCE = 0.03
"""Of a group's difference: shares of positions guessed right over stretches, so a mixture of texts and chance."""
ASIDE = 0.1
"""Of a tenant's capital, what is never staked: so no tenant's samples undo what the others' have shown."""
TAKING_PART = 8
"""Groups, from which on a tenant takes part, and a class can be in doubt."""
ONE_TENANT = 0.75
"""Of the evidence that decides, what one tenant's samples count for at most where several take part."""
CLASSES = 16
"""Of a tenant, told apart; further ones count as one."""
IN_DOUBT = 0.5
"""Of the evidence that decides: a class that looks so much worse holds up a promotion."""

_Values = npt.NDArray[np.float64]
_Stratum = tuple[str, str]


@dataclass
class _Pairing:
    """The groups of one stratum, as its samples come. At most one of the two sides has samples that wait."""

    waiting: list[Sample] = field(default_factory=list)
    """Of one side, the latest last."""
    canary: list[float] = field(default_factory=list)
    """Of each group, the mean of its samples of this side; as is the next."""
    stable: list[float] = field(default_factory=list)
    samples: list[int] = field(default_factory=lambda: [0, 0])
    """In groups: of the stable side, of the canary's."""

    def add(self, sample: Sample) -> None:
        """Which group it is in is settled by sides and times alone, never by what samples show: bets stay fair."""
        self.waiting = [s for s in self.waiting if sample.at_s - s.at_s <= NEAR_S]
        if not self.waiting or self.waiting[0].canary is sample.canary:
            self.waiting = [*self.waiting, sample][-NEAREST:]
            return
        beside = _mean([s.value for s in self.waiting])
        self.samples[sample.canary] += 1
        self.samples[not sample.canary] += len(self.waiting)
        self.canary.append(sample.value if sample.canary else beside)
        self.stable.append(beside if sample.canary else sample.value)
        self.waiting = []

    @property
    def differences(self) -> _Values:
        """Of the groups, canary less stable, from -1 to 1."""
        values: _Values = np.array(self.canary) - np.array(self.stable)
        return values


def weigh(samples: Sequence[Sample], rule: Rule) -> Evidence:
    """All the evidence there is. samples: in the order in which they were reported."""
    strata = _strata(samples)
    found = {stratum: pairing.differences for stratum, pairing in strata.items()}
    better = {stratum: _log_capital(d + rule.bound, rule.bound, 1.0 - rule.bound) for stratum, d in found.items()}
    worse = {stratum: _log_capital(-d - rule.bound, -rule.bound, 1.0 + rule.bound) for stratum, d in found.items()}
    most = rule.needed * ONE_TENANT if _tenants(found) > 1 else np.inf
    return Evidence(
        sum(pairing.samples[True] for pairing in strata.values()),
        sum(pairing.samples[False] for pairing in strata.values()),
        _mean([value for pairing in strata.values() for value in pairing.canary]),
        _mean([value for pairing in strata.values() for value in pairing.stable]),
        _together(better, most),
        _together(worse, most),
        _doubt(found, worse, rule),
    )


def _strata(samples: Sequence[Sample]) -> dict[_Stratum, _Pairing]:
    """By tenant and class."""
    classes: dict[str, dict[str, str]] = {}
    found: dict[_Stratum, _Pairing] = {}
    for sample in samples:
        known = classes.setdefault(sample.tenant, {})
        named = known.setdefault(sample.traffic, sample.traffic if len(known) < CLASSES else "others")
        found.setdefault((sample.tenant, named), _Pairing()).add(sample)
    return found


def _log_capital(gains: _Values, even: float, loss: float) -> float:
    """Logarithm of what betting against "the mean is at most 0" has brought.

    gains: in [-loss, ..]; even: the gain of a group without a difference. The stake is the one that would have grown
    fastest so far, judged by mean and variance (the paper's aGRAPA).
    """
    if not len(gains):
        return 0.0
    before = GUESSES + np.arange(len(gains), dtype=np.float64)
    total, squares = (np.concatenate(([0.0], np.cumsum(part)[:-1])) for part in (gains - even, (gains - even) ** 2))
    drift = total / before
    variance = np.maximum((GUESSES * VARIANCE + squares) / before - drift**2, 1e-3)
    lead = even + drift
    stake = np.clip(lead / (variance + lead**2), 0.0, STAKE / loss)
    return float(np.log1p(stake * gains).sum())


def _tenants(found: dict[_Stratum, _Values]) -> int:
    """How many take part."""
    groups: dict[str, int] = {}
    for (tenant, _), differences in found.items():
        groups[tenant] = groups.get(tenant, 0) + len(differences)
    return sum(count >= TAKING_PART for count in groups.values())


def _together(logs: dict[_Stratum, float], most: float) -> float:
    """Over the classes of each tenant, then over the tenants."""
    by_tenant: dict[str, float] = {}
    for (tenant, _), log in logs.items():
        by_tenant[tenant] = by_tenant.get(tenant, 0.0) + log
    kept = (np.logaddexp(np.log(ASIDE), np.log1p(-ASIDE) + log) for log in by_tenant.values())
    return float(sum(min(log, most) for log in kept))


def _doubt(found: dict[_Stratum, _Values], worse: dict[_Stratum, float], rule: Rule) -> str:
    """The first class with enough groups that seems worse than the bound allows, or that none has enough."""
    enough = {stratum: differences for stratum, differences in found.items() if len(differences) >= TAKING_PART}
    for stratum, differences in enough.items():
        by_chance = float(np.std(differences)) / len(differences) ** 0.5  # among many classes some look worse
        if worse[stratum] >= IN_DOUBT * rule.needed or _mean(differences) + by_chance < -rule.bound:
            return f"class {stratum[1] or '(none)'} of tenant {stratum[0]}"
    return "" if enough else "too few samples"


def _mean(values: Sequence[float] | _Values) -> float:
    return float(np.mean(values)) if len(values) else 0.0
