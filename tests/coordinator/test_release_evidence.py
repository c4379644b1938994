"""Test that the evidence is seldom wrong, although it is evaluated after every few samples, and soon right."""

from __future__ import annotations

import re

import numpy as np
import pytest

from coordinator.releases import evidence
from coordinator.releases.records import AcceptanceSample, CanaryPolicy

POLICY = CanaryPolicy(share=0.25, bound=0.05, alpha=0.01, window_s=3600.0)
PROPOSED = 32


def stream(rng, canary, stable, count, *, share=0.25, spread=0.1, tenant="default", traffic="code"):
    """Draw samples: a share of the sessions has the canary; texts differ, with chance added."""
    sides = (bool(rng.random() < share) for _ in range(count))
    return [sample(rng, i, side, canary if side else stable, spread, tenant, traffic) for i, side in enumerate(sides)]


def sample(rng, at_s, is_canary, mean, spread=0.1, tenant="default", traffic="code"):
    text = float(np.clip(rng.normal(mean, spread), 0.0, 1.0)) if spread else mean
    return AcceptanceSample(is_canary, tenant, traffic, int(rng.binomial(PROPOSED, text)), PROPOSED, float(at_s))


def alternating(count, canary, stable, tenant="t"):
    """Return samples without chance: so many accepted on each side."""
    return [
        AcceptanceSample(i % 2 == 0, tenant, "", stable if i % 2 else canary, PROPOSED, float(i)) for i in range(count)
    ]


def looks(samples, every):
    return [evidence.weigh(samples[:n], POLICY) for n in range(every, len(samples) + 1, every)]


def crossings(rng, canary, stable, *, runs, count, every, **how):
    """Return the shares of the trials in which the evidence ever said "worse" and "not worse"."""
    worse = better = 0
    for _ in range(runs):
        seen = looks(stream(rng, canary, stable, count, **how), every)
        worse += any(look.log_worse >= POLICY.log_threshold for look in seen)
        better += any(look.log_better >= POLICY.log_threshold for look in seen)
    return worse / runs, better / runs


@pytest.mark.parametrize("spread", [0.0, 0.1, 0.25])
def test_at_the_bound_neither_answer_comes_more_often_than_alpha(spread) -> None:
    """The hardest case: the canary is worse by exactly the bound, so both claims are as true as they can be."""
    rng = np.random.default_rng(7)
    most = np.array(
        [
            [
                (look.log_worse, look.log_better)
                for look in looks(stream(rng, 0.6, 0.65, 300, share=0.5, spread=spread), every=30)
            ]
            for _ in range(200)
        ]
    ).max(axis=1)
    for alpha in (0.1, 0.05, 0.01, 0.001):
        assert ((most >= np.log(1 / alpha)).mean(axis=0) <= alpha).all()


def test_a_test_for_one_look_would_be_wrong_more_often_than_alpha_and_be_seen_here() -> None:
    """A z-test, which is not anytime-valid, is evaluated as often on the very same streams."""
    rng = np.random.default_rng(7)
    wrong = 0
    for _ in range(200):
        samples = stream(rng, 0.6, 0.65, 300, share=0.5)
        wrong += any(_z(samples[:n]) <= -2.326 for n in range(30, 301, 30))  # one-sided, alpha 0.01
    assert wrong / 200 > 0.02


def _z(samples) -> float:
    """Return the standard scores by which the canary's mean exceeds the other one's less the bound."""
    canary, stable = (np.array([s.acceptance for s in samples if s.canary is side]) for side in (True, False))
    error = np.sqrt(canary.var(ddof=1) / len(canary) + stable.var(ddof=1) / len(stable))
    return float((canary.mean() - stable.mean() + POLICY.bound) / error)


def test_a_draft_that_makes_no_difference_is_hardly_ever_called_worse() -> None:
    worse, _ = crossings(np.random.default_rng(1), 0.6, 0.6, runs=200, count=300, every=30)
    assert worse <= POLICY.alpha


def test_a_draft_that_is_much_worse_is_called_so_soon() -> None:
    worse, better = crossings(np.random.default_rng(2), 0.35, 0.65, runs=40, count=200, every=20)
    assert worse == 1.0
    assert better == 0.0


def test_a_draft_that_is_much_better_is_called_so_soon() -> None:
    worse, better = crossings(np.random.default_rng(3), 0.75, 0.5, runs=40, count=160, every=20)
    assert better >= 0.95
    assert worse == 0.0


def test_a_draft_that_makes_no_difference_is_found_not_worse_within_its_trial() -> None:
    _, better = crossings(np.random.default_rng(4), 0.65, 0.65, runs=20, count=2_000, every=250)
    assert better >= 0.9


def test_a_canary_that_only_got_the_easy_texts_is_not_taken_for_a_better_one() -> None:
    """Nine in ten of its sessions are of the class that is easy for every draft: compared by class it is worse."""
    rng = np.random.default_rng(5)
    samples = [
        *stream(rng, 0.70, 0.85, 100, share=0.9, traffic="easy"),
        *stream(rng, 0.15, 0.30, 100, share=0.1, traffic="hard"),
    ]
    rng.shuffle(samples)
    canary, stable = (np.mean([s.acceptance for s in samples if s.canary is side]) for side in (True, False))
    assert canary > stable + 0.1
    shown = evidence.weigh(samples, POLICY)
    assert shown.canary_acceptance < shown.stable_acceptance
    assert shown.log_better < 1.0
    assert shown.log_worse > shown.log_better


def test_worse_in_one_class_is_seen_though_better_over_all() -> None:
    rng = np.random.default_rng(6)
    samples = stream(rng, 0.9, 0.6, 300, traffic="arithmetic") + stream(rng, 0.3, 0.6, 200, traffic="code")
    rng.shuffle(samples)
    shown = evidence.weigh(samples, POLICY)
    assert shown.log_worse >= POLICY.log_threshold
    assert "class code" in shown.doubt


def test_evidence_of_several_classes_adds_up() -> None:
    rng = np.random.default_rng(8)
    one, other = (stream(rng, 0.5, 0.65, 80, share=0.5, traffic=name) for name in ("code", "chat"))
    alone = evidence.weigh(one, POLICY).log_worse, evidence.weigh(other, POLICY).log_worse
    assert evidence.weigh(one + other, POLICY).log_worse > max(alone) + 0.5 * min(alone)


# --- traffic that changes while the trial runs


def decided(samples, every=25):
    """Return the decision of a trial that is evaluated so often: "worse", "stable" or ""."""
    for look in looks(samples, every):
        if look.log_worse >= POLICY.log_threshold:
            return "worse"
        if look.log_better >= POLICY.log_threshold and not look.doubt:
            return "stable"
    return ""


def trials(lead, before, after, *, worse_by=0.0, runs=40, count=500):
    """Return the decisions of trials in which at first only the stable side has samples, before traffic changes."""
    found = []
    for seed in range(runs):
        rng = np.random.default_rng(seed)
        samples = [sample(rng, i, False, before) for i in range(lead)]
        sides = (bool(rng.random() < 0.25) for _ in range(count))
        samples += [sample(rng, lead + i, side, after - worse_by * side) for i, side in enumerate(sides)]
        found.append(decided(samples))
    return found


@pytest.mark.parametrize("lead", [30, 60, 150, 300])
def test_a_worse_canary_is_not_promoted_because_traffic_eased_before_it_was_there(lead) -> None:
    assert "stable" not in trials(lead, 0.4, 0.8, worse_by=0.1)


@pytest.mark.parametrize("lead", [20, 60, 150])
def test_an_equal_canary_is_not_rolled_back_because_traffic_hardened_before_it_was_there(lead) -> None:
    assert "worse" not in trials(lead, 0.75, 0.5)


@pytest.mark.parametrize("turn", [40, 100, 200])
def test_traffic_that_turns_during_the_trial_is_nobodys_fault(turn) -> None:
    for before, after, worse_by, wrong in ((0.75, 0.5, 0.0, "worse"), (0.4, 0.8, 0.1, "stable")):
        found = []
        for seed in range(20):
            rng = np.random.default_rng(seed)
            sides = [bool(rng.random() < 0.25) for _ in range(500)]
            means = [(before if i < turn else after) - worse_by * side for i, side in enumerate(sides)]
            found.append(decided([sample(rng, i, *one) for i, one in enumerate(zip(sides, means, strict=True))]))
        assert wrong not in found


@pytest.mark.parametrize("ramp", [1, 150, 300])
def test_a_worse_canary_that_spreads_while_traffic_eases_is_not_promoted(ramp) -> None:
    found = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        sides = [bool(rng.random() < 0.25 * min(1.0, i / ramp)) for i in range(700)]
        means = [0.4 + 0.4 * min(1.0, i / 600) - 0.1 * side for i, side in enumerate(sides)]
        found.append(decided([sample(rng, i, *one) for i, one in enumerate(zip(sides, means, strict=True))]))
    assert "stable" not in found


def test_one_side_that_ends_before_the_other_leaves_the_other_without_weight() -> None:
    """The stable side is full, then traffic gets harder: the canary's further samples have none to be compared with."""
    for seed in range(10):
        rng = np.random.default_rng(seed)
        samples = stream(rng, 0.66, 0.70, 400)
        alone = [sample(rng, 400 + i, True, 0.41) for i in range(400)]
        assert decided(samples + alone) != "worse"


def test_at_the_bound_neither_answer_comes_more_often_than_alpha_while_traffic_swings() -> None:
    rng = np.random.default_rng(12)
    most = []
    for _ in range(200):
        sides = [bool(rng.random() < 0.25) for _ in range(300)]
        means = [0.6 + 0.2 * np.sin(i / 25) - 0.05 * side for i, side in enumerate(sides)]
        seen = looks([sample(rng, i, *one) for i, one in enumerate(zip(sides, means, strict=True))], every=30)
        most.append(np.max([(look.log_worse, look.log_better) for look in seen], axis=0))
    for alpha in (0.1, 0.05, 0.01):
        assert ((np.array(most) >= np.log(1 / alpha)).mean(axis=0) <= alpha).all()


def test_only_samples_of_the_same_time_are_compared() -> None:
    near, far = evidence.NEAR_S, evidence.NEAR_S + 1.0
    for apart, compared in ((near, 1), (far, 0)):
        samples = [AcceptanceSample(False, "t", "", 0, 32, 0.0), AcceptanceSample(True, "t", "", 32, 32, apart)]
        shown = evidence.weigh(samples, POLICY)
        assert (shown.canary_samples, shown.stable_samples) == (compared, compared)


def test_of_a_lead_only_the_latest_few_are_compared() -> None:
    samples = [AcceptanceSample(False, "t", "", 32 * (i >= 497), 32, i / 10) for i in range(500)]
    shown = evidence.weigh([*samples, AcceptanceSample(True, "t", "", 32, 32, 50.0)], POLICY)
    assert (shown.stable_samples, shown.stable_acceptance) == (evidence.NEAREST, 1.0)


def test_many_tenants_with_few_samples_each_decide_together() -> None:
    """With an equal draft and thirty tenants, nobody's first samples are spent on learning at the others' cost."""
    found = []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        tenants = rng.integers(30, size=3_600)
        samples = [sample(rng, i, bool(rng.random() < 0.25), 0.6, tenant=f"t{t}") for i, t in enumerate(tenants)]
        found.append(decided(samples, every=400))
    assert found.count("stable") >= 9
    assert "worse" not in found


def mixed(rng, tenants, count, canary, stable, lies=None):
    """Draw samples of several tenants, a share of them each. lies: tenant -> what its canary seems better by."""
    names = [str(name) for name in rng.choice(list(tenants), p=list(tenants.values()), size=count)]
    sides = [bool(rng.random() < 0.25) for _ in names]
    means = [(stable + lies[n] if n in lies else canary) if s else stable for n, s in zip(names, sides, strict=True)]
    return [sample(rng, i, *one) for i, one in enumerate(zip(sides, means, [0.1] * count, names, strict=True))]


def evenly(count):
    return {f"t{i}": 1 / count for i in range(count)}


def test_a_draft_that_is_worse_for_more_tenants_than_may_lie_is_in_doubt() -> None:
    rng = np.random.default_rng(13)
    worse = {f"t{i}": -0.2 for i in range(3)}
    assert evidence.may_lie(10) == 2
    shown = evidence.weigh(mixed(rng, evenly(10), 3_000, 0.7, 0.6, worse), POLICY)
    assert re.fullmatch("class code of tenant t[012], and classes of 2 other tenants", shown.doubt)
    few = {f"t{i}": -0.2 for i in range(2)}
    shown = evidence.weigh(mixed(rng, evenly(10), 3_000, 0.7, 0.6, few), POLICY)
    assert shown.doubt == ""
    assert shown.log_better >= POLICY.log_threshold


# --- who may say how much


def test_where_several_tenants_take_part_none_decides_alone() -> None:
    rng = np.random.default_rng(9)
    liar = alternating(2_000, 0, PROPOSED, "liar")
    honest = stream(rng, 0.65, 0.65, 60, share=0.5, tenant="honest")
    assert evidence.weigh(liar, POLICY).log_worse >= POLICY.log_threshold  # where nobody else is
    assert evidence.weigh(liar + honest, POLICY).log_worse < POLICY.log_threshold


def test_no_tenant_undoes_what_others_have_shown() -> None:
    rng = np.random.default_rng(10)
    honest = [s for name in ("a", "b", "c") for s in stream(rng, 0.3, 0.7, 200, share=0.5, tenant=name)]
    liar = alternating(2_000, PROPOSED, 0, "liar")
    assert evidence.weigh(honest + liar, POLICY).log_worse >= POLICY.log_threshold


HOSTILE = {"liar": 0.5, "a": 0.25, "b": 0.25}
"""One tenant has half of the samples."""


def decisions(tenants, *, canary, lie, runs=20, count=2_400, needed=3):
    """Return the decisions of trials beside a stable draft of 60%, in which the tenant "liar" lies."""
    found = []
    for seed in range(runs):
        samples = mixed(np.random.default_rng(seed), tenants, count, canary, 0.6, {"liar": lie})
        seen = [look for look in looks(samples, 200) if look.tenants >= needed]
        found.append(next((verdict for look in seen if (verdict := verdict_of(look))), ""))
    return found


def verdict_of(look):
    if look.log_worse >= POLICY.log_threshold:
        return "worse"
    return "stable" if look.log_better >= POLICY.log_threshold and not look.doubt else ""


@pytest.mark.parametrize("lie", [0.1, 0.2, 0.4])
def test_a_tenant_with_half_of_the_samples_does_not_make_a_worse_draft_stable(lie) -> None:
    found = decisions(HOSTILE, canary=0.48, lie=lie)  # a fifth worse than 60%
    assert "stable" not in found
    assert found.count("worse") >= 10


@pytest.mark.parametrize("lie", [-0.1, -0.2, -0.4])
def test_a_tenant_with_half_of_the_samples_does_not_have_a_better_draft_rolled_back(lie) -> None:
    found = decisions(HOSTILE, canary=0.66, lie=lie)  # a tenth better than 60%
    assert "worse" not in found
    assert found.count("stable") >= 18


@pytest.mark.parametrize(("canary", "lie", "wrong"), [(0.48, 0.4, "stable"), (0.66, -0.4, "worse")])
def test_two_of_nine_tenants_may_lie_with_most_of_the_samples(canary, lie, wrong) -> None:
    found = []
    tenants = {"liar": 0.3, "cheat": 0.3} | {f"t{i}": 0.4 / 7 for i in range(7)}
    for seed in range(10):
        lies = {"liar": lie, "cheat": lie}
        samples = mixed(np.random.default_rng(seed), tenants, 3_600, canary, 0.6, lies)
        found.append(next((verdict for look in looks(samples, 300) if (verdict := verdict_of(look))), ""))
    assert wrong not in found


def test_with_one_liar_neither_answer_comes_more_often_than_alpha_at_the_bound() -> None:
    """The honest canary is worse by exactly the bound, and the liar argues for either side."""
    for lie, log in ((0.4, "log_better"), (-0.4, "log_worse")):
        most = []
        for seed in range(60):
            samples = mixed(np.random.default_rng(seed), HOSTILE, 600, 0.55, 0.6, {"liar": lie})
            most.append(max(getattr(look, log) for look in looks(samples, 60) if look.tenants >= 2))
        for alpha in (0.1, 0.05, 0.01):
            assert (np.array(most) >= np.log(1 / alpha)).mean() <= alpha


def test_a_tenant_takes_part_once_it_has_enough_groups() -> None:
    few = alternating(2 * evidence.MIN_GROUPS - 2, 20, 20, "few")
    enough = alternating(2 * evidence.MIN_GROUPS, 20, 20, "enough")
    assert evidence.weigh(few, POLICY).tenants == 0
    assert evidence.weigh(few + enough, POLICY).tenants == 1


def test_classes_beyond_a_tenants_few_count_as_one() -> None:
    rng = np.random.default_rng(11)
    samples = [s for i in range(400) for s in stream(rng, 0.3, 0.7, 4, share=0.5, traffic=f"class-{i}")]
    assert evidence.weigh(samples, POLICY).log_worse >= POLICY.log_threshold


@pytest.mark.parametrize(
    "samples",
    [[], [AcceptanceSample(True, "t", "", 32, 32, 0.0)], [AcceptanceSample(False, "t", "", 0, 32, 0.0)] * 500],
)
def test_one_side_alone_decides_nothing(samples) -> None:
    shown = evidence.weigh(samples, POLICY)
    assert shown.log_worse < 1.0
    assert shown.doubt == "too few samples"


@pytest.mark.parametrize(("canary", "stable"), [(0, 0), (0, 32), (32, 0), (32, 32)])
def test_extremes_are_finite_and_of_the_right_sign(canary, stable) -> None:
    shown = evidence.weigh(alternating(400, canary, stable), POLICY)
    assert np.isfinite([shown.log_better, shown.log_worse]).all()
    assert (shown.log_worse >= POLICY.log_threshold) == (canary < stable)
    assert (shown.log_better >= POLICY.log_threshold) == (canary >= stable)
