"""Decide whether a trained draft may go out to devices: a pure function of what was measured on held-out texts.

Both drafts are measured on the same texts, so the relative gain in tokens per step on a group of texts is the
incumbent's number of steps over the candidate's, less one. Its lower bound is a bootstrap percentile over sessions
(Efron 1979), since texts of one session are alike, and is never above the gain itself. The candidate passes if, with
the chain and with the tree,

    on all texts of the fresh classes together   the lower bound is at least `gain`
    on each class, fresh or not                  the lower bound is above `-loss`

and decoding a token takes it at most `slower` times as long as the incumbent. Classes with few sessions or positions
are judged together, if need be with the smallest of the others, so that every text is judged. The resamples are the
same for every candidate, so a draft that is accepted more often never does worse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cloud_verifier.distill.config import GateRule
from cloud_verifier.distill.gguf.eval_gguf import DraftComparison, DraftCounts, TextComparison

RARE = "(rare)"
"""Name of the group of classes that have too few texts each."""
SHOWN_CLASSES = 10
"""Classes in a manifest, which holds at most 64 numbers."""
_SHAPES: Mapping[str, Callable[[DraftCounts], int]] = {
    "chain": lambda counts: counts.chain_steps,
    "tree": lambda counts: counts.tree_steps,
}


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
    texts: int
    sessions: int
    positions: int
    candidate: DraftRates
    incumbent: DraftRates
    chain_gain: float
    chain_least: float
    tree_gain: float
    tree_least: float

    @property
    def bounds(self) -> tuple[tuple[str, float, float], ...]:
        """Return (shape, gain, lower bound) for each shape."""
        return ("chain", self.chain_gain, self.chain_least), ("tree", self.tree_gain, self.tree_least)


@dataclass(frozen=True)
class GateVerdict:
    """The gate's decision and the measurements that led to it."""

    passed: bool
    reasons: tuple[str, ...]
    """Reasons for a refusal; empty if the candidate passed."""
    notes: tuple[str, ...]
    """Classes that were not judged, or not by themselves."""
    fresh: GroupComparison | None
    """All texts of the fresh classes; None if there are none."""
    classes: tuple[GroupComparison, ...]
    candidate_ms: float
    incumbent_ms: float

    def to_json(self) -> dict[str, Any]:
        """Return the verdict with its metrics, as `gate.json` has it."""
        return dataclasses.asdict(self) | {"metrics": self.metrics()}

    def metrics(self) -> dict[str, float]:
        """Return the numbers that a manifest has."""
        found = {"draft_ms": self.candidate_ms, "parent_draft_ms": self.incumbent_ms}
        named = [("fresh", self.fresh)] if self.fresh else []
        largest = sorted(self.classes, key=lambda group: -group.positions)[:SHOWN_CLASSES]
        for name, group in [*named, *((group.name or "(none)", group) for group in largest)]:
            found[f"acceptance.{name}"] = group.candidate.acceptance
            found[f"tokens_per_step.{name}"] = group.candidate.chain
            found[f"tokens_per_step_tree.{name}"] = group.candidate.tree
            found[f"gain.{name}"] = group.chain_gain
            found[f"gain_at_least.{name}"] = group.chain_least
        return found


def decide(
    comparison: DraftComparison, fresh: Collection[str], rule: GateRule, trained: Collection[str] = ()
) -> GateVerdict:
    """Let a candidate pass or not. fresh: the classes that it was trained for. trained: all classes in its dataset."""
    texts = comparison.texts
    fresh_texts = [text for text in texts if text.traffic_class in fresh]
    overall = _compared("fresh classes", fresh_texts, rule) if fresh_texts else None
    groups, notes = _by_class(texts, rule)
    unseen = sorted(set(trained) - {text.traffic_class for text in texts})
    notes += tuple(f"not judged: class {name!r}, of which no text that counts was held out" for name in unseen)
    reasons = []
    if _sessions(fresh_texts) < rule.sessions:
        reasons.append(
            f"{_sessions(fresh_texts)} held-out sessions of the fresh classes, {rule.sessions} are needed: gather more"
            " traffic"
        )
    for shape, gain, least in overall.bounds if overall else ():
        if not least >= rule.gain:
            reasons.append(_reason(shape, "the fresh classes", gain, least, rule, f"at least {rule.gain:+.1%}"))
    for group in groups:
        for shape, gain, least in group.bounds:
            if not least > -rule.loss:
                reasons.append(_reason(shape, f"class {group.name!r}", gain, least, rule, f"above {-rule.loss:+.1%}"))
    allowed_ms = rule.slower * comparison.incumbent_ms
    if comparison.candidate_ms > allowed_ms:
        reasons.append(f"a token takes {comparison.candidate_ms:.2f} ms, at most {allowed_ms:.2f} ms are allowed")
    return GateVerdict(
        not reasons, tuple(reasons), notes, overall, groups, comparison.candidate_ms, comparison.incumbent_ms
    )


def _by_class(texts: Sequence[TextComparison], rule: GateRule) -> tuple[tuple[GroupComparison, ...], tuple[str, ...]]:
    """Return the classes that are large enough, the others as one group, and a note on those.

    Where the others are too few even together, the smallest class that is large enough is part of their group, too.
    """
    by_class: dict[str, list[TextComparison]] = {}
    for text in texts:
        by_class.setdefault(text.traffic_class, []).append(text)
    by_size = sorted(by_class, key=lambda name: (_enough(by_class[name], rule), _sessions(by_class[name]), name))
    rare = [name for name in by_size if not _enough(by_class[name], rule)]
    together, pooled = list(rare), [text for name in rare for text in by_class[name]]
    for name in by_size[len(rare) :]:
        if not rare or _enough(pooled, rule):
            break
        together.append(name)
        pooled += by_class[name]
    notes: tuple[str, ...] = ()
    if rare and len(together) > 1:  # a single class is judged by itself whatever its size
        by_class = {name: found for name, found in by_class.items() if name not in rare} | {RARE: pooled}
        notes = (f"judged together only: {', '.join(map(repr, rare))}, as {RARE} of {', '.join(map(repr, together))}",)
    return tuple(_compared(name, found, rule) for name, found in sorted(by_class.items())), notes


def _enough(texts: Sequence[TextComparison], rule: GateRule) -> bool:
    return _sessions(texts) >= rule.sessions and sum(text.positions for text in texts) >= rule.positions


def _sessions(texts: Sequence[TextComparison]) -> int:
    return len({text.session for text in texts})


def _compared(name: str, texts: Sequence[TextComparison], rule: GateRule) -> GroupComparison:
    gains = {shape: _gain(texts, count, rule) for shape, count in _SHAPES.items()}
    positions = sum(text.positions for text in texts)
    return GroupComparison(
        name,
        len(texts),
        _sessions(texts),
        positions,
        _rates([text.candidate for text in texts], positions),
        _rates([text.incumbent for text in texts], positions),
        *gains["chain"],
        *gains["tree"],
    )


def _rates(counts: Sequence[DraftCounts], positions: int) -> DraftRates:
    return DraftRates(
        sum(count.accepted for count in counts) / positions,
        positions / sum(count.chain_steps for count in counts),
        positions / sum(count.tree_steps for count in counts),
    )


def _gain(texts: Sequence[TextComparison], count: Callable[[DraftCounts], int], rule: GateRule) -> tuple[float, float]:
    """Return the relative gain in tokens per step, and its lower bound."""
    sessions = sorted({text.session for text in texts})
    index = np.array([sessions.index(text.session) for text in texts])
    new = np.bincount(index, [count(text.candidate) for text in texts])
    old = np.bincount(index, [count(text.incumbent) for text in texts])
    drawn = np.random.default_rng(0).integers(len(sessions), size=(rule.resamples, len(sessions)))
    resampled = old[drawn].sum(1) / new[drawn].sum(1) - 1
    gain = float(old.sum() / new.sum() - 1)
    return gain, min(gain, float(np.quantile(resampled, 1 - rule.confidence)))


def _reason(shape: str, name: str, gain: float, least: float, rule: GateRule, required: str) -> str:
    return (
        f"{shape}: tokens per step on {name} are {gain:+.1%}, with confidence {rule.confidence:.0%} at least"
        f" {least:+.1%}; must be {required}"
    )
