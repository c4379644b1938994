"""Whether a trained draft may go out to devices: a pure decision over what was measured on held-out texts.

Both drafts were measured on the same texts, so the gain of a group of texts is the incumbent's steps over the
candidate's, less one: by how much more the tokens per step are. Its lower bound is a bootstrap percentile over sessions
(Efron 1979), whose texts are alike, and never above the gain itself. The candidate passes if, for the chain and for the
tree alike,

    on all texts of the fresh classes together   the lower bound is at least `gain`
    on each class, fresh or not                  the lower bound is above `-loss`

and it does not take more than `slower` times the incumbent's time for a token. Classes of few sessions or positions are
judged together, and where even together they are few, with the smallest class that is not: every text is judged. The
resamples are the same for every candidate, so a draft that is right more often never does worse.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cloud_verifier.distill.gguf.eval_gguf import Counts, Measured, TextCounts

RARE = "(rare)"
"""What the classes of too few texts are called together."""
SHOWN_CLASSES = 10
"""In a manifest, which holds 64 numbers at most."""
_SHAPES: Mapping[str, Callable[[Counts], int]] = {
    "chain": lambda counts: counts.chain_steps,
    "tree": lambda counts: counts.tree_steps,
}


@dataclass(frozen=True)
class Rule:
    """What a candidate must show."""

    gain: float = 0.02
    """Share by which tokens per step must be more on the fresh classes."""
    loss: float = 0.05
    """Share by which they may be fewer on any class."""
    slower: float = 1.25
    """Of the incumbent's time for a token."""
    confidence: float = 0.95
    """One-sided, of each bound. At least 0.5."""
    sessions: int = 8
    """Fewest of the fresh classes, and of a class that is judged by itself."""
    positions: int = 2_000
    """Fewest of a class that is judged by itself. Of fewer the bound is so loose that an unchanged class is refused
    once in four times at 500."""
    resamples: int = 2_000


@dataclass(frozen=True)
class Shares:
    """One draft on one group of texts."""

    acceptance: float
    """Share of first guesses that were right."""
    chain: float
    """Tokens per step."""
    tree: float


@dataclass(frozen=True)
class Group:
    """Both drafts on one group of texts, and the gain with its lower bound."""

    name: str
    texts: int
    sessions: int
    positions: int
    candidate: Shares
    incumbent: Shares
    chain_gain: float
    chain_least: float
    tree_gain: float
    tree_least: float


@dataclass(frozen=True)
class Verdict:
    """The gate's answer, with what it rests on."""

    passed: bool
    reasons: tuple[str, ...]
    """Why not; empty for one that passed."""
    notes: tuple[str, ...]
    """What was not judged, or not by itself."""
    fresh: Group | None
    """All texts of the fresh classes; None where there are none."""
    classes: tuple[Group, ...]
    candidate_ms: float
    incumbent_ms: float

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def metrics(self) -> dict[str, float]:
        """For the manifest."""
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


def decide(measured: Measured, fresh: Collection[str], rule: Rule, learnt: Collection[str] = ()) -> Verdict:
    """Let a candidate pass or not. fresh: the classes that it was trained for. learnt: all that it learnt from."""
    wanted = [text for text in measured.texts if text.traffic_class in fresh]
    overall = _group("fresh classes", wanted, rule) if wanted else None
    groups, notes = _classes(measured.texts, rule)
    unseen = sorted(set(learnt) - {text.traffic_class for text in measured.texts})
    notes += tuple(f"not judged: class {name!r}, of which no text that counts was held out" for name in unseen)
    reasons = [
        *_too_few(wanted, rule),
        *(_no_gain(overall, rule) if overall else ()),
        *(reason for group in groups for reason in _loses(group, rule)),
        *_slow(measured, rule),
    ]
    return Verdict(not reasons, tuple(reasons), notes, overall, groups, measured.candidate_ms, measured.incumbent_ms)


def _classes(texts: Sequence[TextCounts], rule: Rule) -> tuple[tuple[Group, ...], tuple[str, ...]]:
    """Those large enough, the others as one group, if need be with the smallest of the former; and a word of it."""
    by_class: dict[str, list[TextCounts]] = {}
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
    if rare and len(together) > 1:  # a class that is alone is judged by itself whatever its size
        by_class = {name: found for name, found in by_class.items() if name not in rare} | {RARE: pooled}
        notes = (f"judged together only: {', '.join(map(repr, rare))}, as {RARE} of {', '.join(map(repr, together))}",)
    return tuple(_group(name, found, rule) for name, found in sorted(by_class.items())), notes


def _enough(texts: Sequence[TextCounts], rule: Rule) -> bool:
    return _sessions(texts) >= rule.sessions and sum(text.positions for text in texts) >= rule.positions


def _sessions(texts: Sequence[TextCounts]) -> int:
    return len({text.session for text in texts})


def _group(name: str, texts: Sequence[TextCounts], rule: Rule) -> Group:
    gains = {shape: _gain(texts, count, rule) for shape, count in _SHAPES.items()}
    positions = sum(text.positions for text in texts)
    return Group(
        name,
        len(texts),
        _sessions(texts),
        positions,
        _shares([text.candidate for text in texts], positions),
        _shares([text.incumbent for text in texts], positions),
        *gains["chain"],
        *gains["tree"],
    )


def _shares(counts: Sequence[Counts], positions: int) -> Shares:
    return Shares(
        sum(count.right for count in counts) / positions,
        positions / sum(count.chain_steps for count in counts),
        positions / sum(count.tree_steps for count in counts),
    )


def _gain(texts: Sequence[TextCounts], count: Callable[[Counts], int], rule: Rule) -> tuple[float, float]:
    """The gain in tokens per step, and its lower bound."""
    names = sorted({text.session for text in texts})
    place = np.array([names.index(text.session) for text in texts])
    new = np.bincount(place, [count(text.candidate) for text in texts])
    old = np.bincount(place, [count(text.incumbent) for text in texts])
    drawn = np.random.default_rng(0).integers(len(names), size=(rule.resamples, len(names)))
    resampled = old[drawn].sum(1) / new[drawn].sum(1) - 1
    gain = float(old.sum() / new.sum() - 1)
    return gain, min(gain, float(np.quantile(resampled, 1 - rule.confidence)))


def _too_few(fresh: Sequence[TextCounts], rule: Rule) -> list[str]:
    if _sessions(fresh) >= rule.sessions:
        return []
    return [
        f"{_sessions(fresh)} held-out sessions of the fresh classes, {rule.sessions} are needed: gather more traffic"
    ]


def _no_gain(group: Group, rule: Rule) -> list[str]:
    return [
        f"{shape}: tokens per step on the {group.name} are {gain:+.1%}, with confidence {rule.confidence:.0%} at least "
        f"{least:+.1%}; must be at least {rule.gain:+.1%}"
        for shape, gain, least in _bounds(group)
        if not least >= rule.gain
    ]


def _loses(group: Group, rule: Rule) -> list[str]:
    return [
        f"{shape}: tokens per step on class {group.name!r} are {gain:+.1%}, with confidence {rule.confidence:.0%} at "
        f"least {least:+.1%}; must be above {-rule.loss:+.1%}"
        for shape, gain, least in _bounds(group)
        if not least > -rule.loss
    ]


def _slow(measured: Measured, rule: Rule) -> list[str]:
    allowed = rule.slower * measured.incumbent_ms
    if measured.candidate_ms <= allowed:
        return []
    return [f"a token takes {measured.candidate_ms:.2f} ms, at most {allowed:.2f} ms are allowed"]


def _bounds(group: Group) -> tuple[tuple[str, float, float], ...]:
    return ("chain", group.chain_gain, group.chain_least), ("tree", group.tree_gain, group.tree_least)
