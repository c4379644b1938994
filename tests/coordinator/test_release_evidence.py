"""Test that the evidence is seldom wrong, although it is evaluated after every few samples, and soon right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np
import pytest

from coordinator.releases import evidence
from coordinator.releases.evidence import LOG_THRESHOLD, Arm, Arms
from coordinator.releases.handlers import IN_STEP

THREE, TRUSTING = 3, 1
"""Tenants that a decision needs."""
PROPOSED = 32
Sample = tuple[str, bool, float]
"""Tenant, whether it is the canary's, and acceptance."""


def samples(rng, tenants: Iterable[str], sides: list[bool], means: list[float], spread: float = 0.1) -> list[Sample]:
    """Draw samples: texts differ, with chance added."""
    texts = np.clip(rng.normal(means, spread), 0.0, 1.0)
    return list(zip(tenants, sides, (rng.binomial(PROPOSED, texts) / PROPOSED).tolist(), strict=True))


def looks(drawn: Iterable[Sample], every: int, needed: int = TRUSTING):
    """Weigh after every so many samples, which are taken in step, as the handlers do."""
    tenants: defaultdict[str, Arms] = defaultdict(Arms)
    for number, (tenant, is_canary, acceptance) in enumerate(drawn, 1):
        arms = tenants[tenant]
        own, other = (arms.canary, arms.stable) if is_canary else (arms.stable, arms.canary)
        if own.samples < IN_STEP * (other.samples + 1):
            grown = Arm(own.samples + 1, own.total + acceptance, own.squares + acceptance**2)
            tenants[tenant] = arms._replace(**{"canary" if is_canary else "stable": grown})
        if number % every == 0:
            yield evidence.weigh(tenants, needed)


def decided(drawn: Iterable[Sample], every: int = 30, needed: int = TRUSTING) -> str:
    """Return the decision of a trial that is evaluated so often: "worse", "stable" or ""."""
    for look in looks(drawn, every, needed):
        if look.tenants >= needed and look.log_worse >= LOG_THRESHOLD:
            return "worse"
        if look.tenants >= needed and look.log_better >= LOG_THRESHOLD:
            return "stable"
    return ""


def trial(seed: int, canary: float, stable: float, count: int, spread: float = 0.1) -> str:
    rng = np.random.default_rng(seed)
    sides = (rng.random(count) < 0.25).tolist()
    return decided(samples(rng, ["t"] * count, sides, [canary if side else stable for side in sides], spread))


@pytest.mark.parametrize("spread", [0.0, 0.25])
@pytest.mark.parametrize(("canary", "wrong", "right"), [(0.55, "stable", "worse"), (0.60, "worse", "stable")])
def test_neither_decision_is_wrong_more_often_than_alpha(canary, wrong, right, spread) -> None:
    """The hardest cases: the canary is worse by exactly the bound, or not at all."""
    found = [trial(seed, canary, 0.60, 600, spread) for seed in range(400)]
    assert found.count(wrong) <= 9  # 4 at ALPHA; ten or more by chance in one of 100 such tests
    assert found.count(right) > 10 * found.count(wrong)


# --- who may say how much


def mixed(rng, tenants: Mapping[str, float], count: int, canary: float, lies: Mapping[str, float]) -> list[Sample]:
    """Draw samples of several tenants, a share of them each, beside a stable draft of 60%. lies: tenant -> what its
    canary seems better by."""
    names = [str(name) for name in rng.choice(list(tenants), p=list(tenants.values()), size=count)]
    sides = (rng.random(count) < 0.25).tolist()
    means = [(0.6 + lies[n] if n in lies else canary) if s else 0.6 for n, s in zip(names, sides, strict=True)]
    return samples(rng, names, sides, means)


@pytest.mark.parametrize(
    ("canary", "lie", "right"),
    [(0.48, 0.1, "worse"), (0.48, 0.4, "worse"), (0.66, -0.1, "stable"), (0.66, -0.4, "stable")],
)
def test_a_hostile_tenant_with_half_of_the_samples_changes_no_decision(canary, lie, right) -> None:
    tenants = {"liar": 0.5, "a": 0.25, "b": 0.25}
    found = [
        decided(mixed(np.random.default_rng(seed), tenants, 2_400, canary, {"liar": lie}), 200, THREE)
        for seed in range(20)
    ]
    assert set(found) <= {right, ""}
    assert found.count(right) >= 18


def test_many_tenants_with_few_samples_each_decide_together() -> None:
    tenants = {f"t{i}": 1 / 30 for i in range(30)}
    found = [decided(mixed(np.random.default_rng(s), tenants, 3_600, 0.6, {}), 400, THREE) for s in range(10)]
    assert found.count("stable") >= 9
    assert "worse" not in found


def arm(samples: int, acceptance: float) -> Arm:
    return Arm(samples, samples * acceptance, samples * acceptance**2)


def test_a_tenant_takes_part_once_it_has_enough_samples_on_both_sides() -> None:
    few, enough = arm(evidence.LEAST - 1, 0.5), arm(evidence.LEAST, 0.5)
    shown = evidence.weigh({"a": Arms(enough, few), "b": Arms(few, enough), "c": Arms(enough, enough)}, THREE)
    assert (shown.tenants, shown.tenants_needed) == (1, 3)
    assert evidence.weigh({}, THREE).log_worse == evidence.weigh({"a": Arms(arm(500, 0.0))}, TRUSTING).log_worse == 0.0


@pytest.mark.parametrize(("canary", "stable"), [(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)])
def test_extremes_are_finite_and_of_the_right_sign(canary, stable) -> None:
    shown = evidence.weigh({"t": Arms(arm(2_000, canary), arm(2_000, stable))}, TRUSTING)
    assert np.isfinite([shown.log_better, shown.log_worse]).all()
    assert (shown.log_worse >= LOG_THRESHOLD) == (canary < stable)
    assert (shown.log_better >= LOG_THRESHOLD) == (canary >= stable)
