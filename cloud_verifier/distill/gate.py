"""Decide whether a trained draft may go out to devices: a pure function of what was measured on held-out texts.

Both drafts are measured on the same texts, so the relative gain in tokens per step on a group of texts is the
incumbent's number of steps over the candidate's, less one. Its lower bound is a bootstrap percentile over sessions
(Efron 1979), since texts of one session are alike, and is never above the gain itself. The candidate passes if, with
the chain and with the tree,

    on all texts of the fresh classes together   the lower bound is at least `gain`
    on all texts, and on each large class        the lower bound is above `-loss`

and decoding a token takes it at most `slower` times as long as the incumbent. Classes with few sessions or positions
are judged among all texts alone. The resamples are the same for every candidate, so a draft that is accepted more often
never does worse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.distill.config import GateRule
from cloud_verifier.distill.evaluation import DraftComparison

FRESH, ALL = "fresh", "(all)"
"""Names of the groups of all texts of the fresh classes, and of all texts."""
RESAMPLES = 2_000
"""Bootstrap samples behind each bound."""
SHOWN_CLASSES = 10
"""Classes in a manifest, which holds at most 64 numbers."""


@dataclass(frozen=True)
class DraftRates:
    """Rates how well one draft predicts a group of texts."""

    acceptance: float
    """Share of positions where the draft's first choice is accepted."""
    chain: float
    """Tokens per verification step with the chain."""
    tree: float


@dataclass(frozen=True)
class GroupComparison:
    """Compares two drafts on a group of texts: the gains in tokens per step, and their lower bounds."""

    name: str
    sessions: int
    positions: int
    candidate: DraftRates
    incumbent: DraftRates
    chain_gain: float
    chain_least: float
    tree_gain: float
    tree_least: float


@dataclass(frozen=True)
class GateVerdict:
    """The gate's decision and the measurements that led to it."""

    passed: bool
    reasons: tuple[str, ...]
    """Reasons for a refusal; empty if the candidate passed."""
    groups: tuple[GroupComparison, ...]
    """The fresh classes together, all texts, and each class, the largest first."""
    candidate_ms: float
    incumbent_ms: float

    def to_json(self) -> dict[str, Any]:
        """Return the verdict with its metrics, as `gate.json` has it."""
        return dataclasses.asdict(self) | {"metrics": self.metrics()}

    def metrics(self) -> dict[str, float]:
        """Return the numbers that a manifest has."""
        found = {"draft_ms": self.candidate_ms, "parent_draft_ms": self.incumbent_ms}
        for group in self.groups[: 2 + SHOWN_CLASSES]:
            name = group.name or "(none)"
            found[f"acceptance.{name}"] = group.candidate.acceptance
            found[f"tokens_per_step.{name}"] = group.candidate.chain
            found[f"tokens_per_step_tree.{name}"] = group.candidate.tree
            found[f"gain.{name}"] = group.chain_gain
            found[f"gain_at_least.{name}"] = group.chain_least
        return found


def decide(comparison: DraftComparison, fresh: Collection[str], rule: GateRule) -> GateVerdict:
    """Let a candidate pass or not. fresh: the classes that it was trained for."""
    classes = np.array(comparison.classes, object)
    of_fresh = np.isin(classes, list(fresh))
    sessions = len(np.unique(comparison.sessions[of_fresh]))
    reasons = []
    if sessions < rule.sessions:
        reasons.append(
            f"{sessions} held-out sessions of the fresh classes, {rule.sessions} are needed: gather more traffic"
        )
    groups = [_compared(name, comparison, classes == name, rule) for name in sorted(set(comparison.classes))]
    groups.sort(key=lambda one: -one.positions)
    if groups:
        groups.insert(0, _compared(ALL, comparison, np.ones(len(classes), bool), rule))
    for group in groups:
        if group.name == ALL or (group.sessions >= rule.sessions and group.positions >= rule.positions):
            reasons += _reasons(group, rule, f"above {-rule.loss:+.1%}", lambda least: least > -rule.loss)
    if of_fresh.any():
        groups.insert(0, _compared(FRESH, comparison, of_fresh, rule))
        reasons += _reasons(groups[0], rule, f"at least {rule.gain:+.1%}", lambda least: least >= rule.gain)
    allowed_ms = rule.slower * comparison.incumbent_ms
    if comparison.candidate_ms > allowed_ms:
        reasons.append(f"a token takes {comparison.candidate_ms:.2f} ms, at most {allowed_ms:.2f} ms are allowed")
    return GateVerdict(not reasons, tuple(reasons), tuple(groups), comparison.candidate_ms, comparison.incumbent_ms)


def _reasons(group: GroupComparison, rule: GateRule, required: str, allowed: Callable[[float], bool]) -> list[str]:
    """Return why a group's lower bounds, with chain and tree, are not what is required."""
    bounds = ("chain", group.chain_gain, group.chain_least), ("tree", group.tree_gain, group.tree_least)
    return [
        f"{shape}: tokens per step on {group.name!r} are {gain:+.1%}, with confidence {rule.confidence:.0%} at least"
        f" {least:+.1%}; must be {required}"
        for shape, gain, least in bounds
        if not allowed(least)
    ]


def _compared(name: str, texts: DraftComparison, chosen: NDArray[np.bool_], rule: GateRule) -> GroupComparison:
    """Compare the drafts on the chosen ones of n texts. chosen: `[n]`."""
    new, old, positions = texts.candidate[chosen], texts.incumbent[chosen], int(texts.positions[chosen].sum())
    sessions, index = np.unique(texts.sessions[chosen], return_inverse=True)
    chain, tree = (_gain(np.bincount(index, new[:, i]), np.bincount(index, old[:, i]), rule) for i in (1, 2))
    return GroupComparison(
        name, len(sessions), positions, _rates(new, positions), _rates(old, positions), *chain, *tree
    )


def _rates(counts: NDArray[np.int64], positions: int) -> DraftRates:
    accepted, chain, tree = map(float, counts.sum(0))
    return DraftRates(accepted / positions, positions / chain, positions / tree)


def _gain(new: NDArray[Any], old: NDArray[Any], rule: GateRule) -> tuple[float, float]:
    """Return the relative gain in tokens per step, and its lower bound. new, old: steps of each session."""
    drawn = np.random.default_rng(0).integers(len(new), size=(RESAMPLES, len(new)))
    resampled = old[drawn].sum(1) / new[drawn].sum(1) - 1
    gain = float(old.sum() / new.sum() - 1)
    return gain, min(gain, float(np.quantile(resampled, 1 - rule.confidence)))
