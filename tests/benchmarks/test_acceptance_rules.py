"""Test that rules which compare p with q keep the target's distribution, and that wrong twins of them do not."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from scipy import optimize, stats

from benchmarks.support import acceptance_rules
from benchmarks.support.acceptance_rules import RULES, Distribution, Rule, acceptance, division_factor, draw

VOCABULARY = 5
DRAWS = 5_000
P = np.array([0.40, 0.25, 0.20, 0.10, 0.05])
DRAFTS = {
    "a good draft": np.array([0.35, 0.30, 0.15, 0.10, 0.10]),
    "an unrelated draft": np.array([0.05, 0.10, 0.15, 0.30, 0.40]),
    "a draft that knows nothing": np.full(VOCABULARY, 0.2),
    "a draft that is sure of two tokens": np.array([0.0, 0.0, 0.0, 0.7, 0.3]),
    "the target itself": P,
}


def committed(rule: Rule, q: Distribution, count: int, *, replacement: bool) -> np.ndarray:
    rng, secret = np.random.default_rng(1), np.random.default_rng(2)
    return np.array([rule(P, q, draw(q, count, rng, replacement=replacement), secret) for _ in range(DRAWS)])


def p_value(tokens: np.ndarray) -> float:
    """Return the p-value of chi-square against the target's distribution."""
    return float(stats.chisquare(np.bincount(tokens, minlength=VOCABULARY), DRAWS * P).pvalue)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", RULES)
def test_the_committed_token_has_the_targets_distribution(name: str, draft: str, count: int) -> None:
    rule, replacement = RULES[name]
    assert p_value(committed(rule, DRAFTS[draft], count, replacement=replacement)) > 1e-4


def drawn_from_p(p: Distribution, q: Distribution, drafted: Sequence[int], rng: np.random.Generator) -> int:
    """Draw, wrongly, from the whole of p after a rejection."""
    if rng.random() * q[drafted[0]] < p[drafted[0]]:
        return drafted[0]
    return int(rng.choice(len(p), p=p))


def with_the_same_p(p: Distribution, q: Distribution, drafted: Sequence[int], rng: np.random.Generator) -> int:
    """Compare, wrongly, each draft with the p of the first."""
    for token in drafted:
        if rng.random() * q[token] < p[token]:
            return token
    return int(rng.choice(len(p), p=acceptance_rules._residual(p, q)))


def without_division(p: Distribution, q: Distribution, drafted: Sequence[int], rng: np.random.Generator) -> int:
    """Take, wrongly, a division factor of 1."""
    for token in drafted:
        if rng.random() * q[token] < p[token]:
            return token
    return int(rng.choice(len(p), p=acceptance_rules._k_sequential_residual(p, q, 1.0, len(drafted))))


def as_if_replaced(p: Distribution, q: Distribution, drafted: Sequence[int], rng: np.random.Generator) -> int:
    """Forget, wrongly, that a draft which was drawn before cannot come again."""
    return acceptance_rules.multi_step(p, q, drafted, rng)


@pytest.mark.parametrize(
    ("twin", "name"),
    [
        (drawn_from_p, "leviathan"),
        (with_the_same_p, "multi_step"),
        (without_division, "k_sequential"),
        (as_if_replaced, "without_replacement"),
    ],
    ids=lambda one: one if isinstance(one, str) else one.__name__,
)
def test_a_wrong_twin_is_rejected(twin: Rule, name: str) -> None:
    replacement = RULES[name][1]
    assert p_value(committed(twin, DRAFTS["an unrelated draft"], 3, replacement=replacement)) < 1e-6


def test_drafts_that_know_the_rules_noise_bias_it() -> None:
    """The drafts must not know the noise: that is why these rules cannot share it as coupling does."""
    q, rng, drawn = DRAFTS["a good draft"], np.random.default_rng(3), []
    for seed in range(DRAWS):
        secret = np.random.default_rng(seed)
        known = np.random.default_rng(seed).random()
        drafted = next(
            (token for token in (4, 3, 2) if known * q[token] < P[token]), draw(q, 1, rng, replacement=True)[0]
        )
        drawn.append(acceptance_rules.leviathan(P, q, [drafted], secret))
    assert p_value(np.array(drawn)) < 1e-6


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("draft", DRAFTS)
@pytest.mark.parametrize("name", ["leviathan", "multi_step", "k_sequential"])
def test_the_formula_gives_how_often_a_draft_is_accepted_and_no_rule_exceeds_the_bound(
    name: str, draft: str, count: int
) -> None:
    q, rng, secret = DRAFTS[draft], np.random.default_rng(4), np.random.default_rng(5)
    rule = RULES[name][0]
    expected = acceptance(name, P, q, count)
    assert expected <= acceptance("bound", P, q, count) + 1e-12
    # A residual may give a token that was drafted and refused before, so the share may be a little greater.
    used = 1 if name == "leviathan" else count
    drawn = [draw(q, count, rng, replacement=True)[:used] for _ in range(3_000)]
    share = float(np.mean([rule(P, q, drafted, secret) in drafted for drafted in drawn]))
    assert share >= expected - 0.03
    assert share <= acceptance("bound", P, q, used) + 0.03


def transport(p: Distribution, q: Distribution, count: int) -> float:
    """Return the greatest share of tokens among their drafts, by a linear program over all couplings."""
    sets = list(itertools.product(range(len(p)), repeat=count))
    inside = np.array([[-float(token in drafts) for token in range(len(p))] for drafts in sets]).ravel()
    rows = [np.repeat(np.eye(len(sets))[at], len(p)) for at in range(len(sets))]
    columns = [np.tile(np.eye(len(p))[token], len(sets)) for token in range(len(p))]
    masses = [*(np.prod([q[token] for token in drafts]) for drafts in sets), *p]
    found = optimize.linprog(inside, A_eq=np.array(rows + columns), b_eq=masses, bounds=(0, None))
    return float(-found.fun)


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_the_bound_is_that_of_the_linear_program(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    p, q = rng.dirichlet(np.full(4, 0.7), 2)
    assert acceptance("bound", p, q, count) == pytest.approx(transport(p, q, count), abs=1e-6)


def test_the_division_factor_is_one_for_one_draft_and_grows_with_their_number() -> None:
    factors = [division_factor(P, DRAFTS["a good draft"], count) for count in (1, 2, 3, 4)]
    assert factors[0] == 1.0
    assert factors == sorted(factors)
    assert factors[3] <= 4.0
