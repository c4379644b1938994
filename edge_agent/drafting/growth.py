"""How the tree grows: pure decisions about what to draft, what to offer and when to send.

Survival S of a node is the estimated probability that the target walks through it: the product of accept probabilities
along its path. A tree that is grown by S is best-first; where wide decodes are dear it comes out as a comb, a greedy
spine with siblings that cost no decode of their own.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.core.protocol.messages import Directive, SessionLimits

DEFAULT_STEP_S = 0.010
"""A target step that nobody has measured yet."""
_SPINE_FLOOR = 2
"""The greedy spine is kept to this depth whatever its survival: a wrong calibration must be able to unlearn."""
_WAIT_GAIN = 2.0
"""Waiting must gain at this multiple of the current rate: nodes that come during a step are not lost."""
_LEAST_SURVIVAL = 0.1
"""What no price goes below: a node costs three to four bytes up and, if it is taken, a row of a step. At 0.1 that is as
much for each that is right as a whole token costs. With 0.12 a token cost 1.3 bytes less, and steps committed 4% fewer
at a round trip of 20 ms."""
_PROBE_STEPS, _PROBE_S = 4, 0.25
"""One message in so many steps, and in so long, where no step takes nodes: they only show how they would do, and each
costs the verifier's front what a few rows cost its engine."""
_EARLY = 0.25
"""Of a step, by which a message should be there before the next one begins: steps and lines vary."""
_DRAFT_WAIT_SHARE = 0.6
"""Of the verifier's patience that drafting may use; the rest is the way there."""


@dataclass(frozen=True)
class SpeculationPlan:
    """What the verifier allows and what the device's clock says, in one snapshot."""

    nodes: int
    """Nodes that the tree may hold."""
    depth: int
    """A child of the root has depth 1."""
    nodes_per_step: int
    """k: nodes that one step of the verifier takes. With 0 a few are drafted still, so that the verifier sees how they
    would do; it waits for none of them."""
    min_acceptance: float
    """Least survival that a node must have."""
    draft_wait_s: float
    """How long the verifier waits for nodes; 0 where it is too far away to wait at all."""
    step_s: float
    siblings: int = 3
    """b: children offered per parent at most."""

    @classmethod
    def of(
        cls, directive: Directive, limits: SessionLimits, *, siblings: int = 3, waits: bool = True
    ) -> SpeculationPlan:
        """The directive, never above the session's limits. waits: the verifier is near enough to wait for nodes."""
        return cls(
            nodes=min(directive.window_nodes, limits.nodes),
            depth=min(directive.window_depth, limits.depth),
            nodes_per_step=directive.nodes_per_step,
            min_acceptance=max(directive.min_acceptance, _LEAST_SURVIVAL),
            draft_wait_s=directive.draft_wait_ms / 1000 if waits else 0.0,
            step_s=directive.step_ms / 1000 or DEFAULT_STEP_S,
            siblings=siblings,
        )

    @property
    def pause_s(self) -> float:
        """Least seconds from one message to the next that nobody waits for."""
        return 0.5 * self.step_s if self.nodes_per_step else max(_PROBE_STEPS * self.step_s, _PROBE_S)

    @property
    def waits(self) -> bool:
        """Whether the verifier waits for nodes where it has none."""
        return self.draft_wait_s > 0.0 and self.nodes_per_step > 0

    @property
    def speculates(self) -> bool:
        """Whether any node is worth drafting; otherwise the session is plain cloud streaming."""
        return self.nodes > 0 and self.depth > 0 and self.min_acceptance < 1.0


@dataclass(frozen=True)
class Leaf:
    """A node that the draft has not evaluated, but could."""

    id: int
    survival: float
    depth: int
    spine: bool = False
    """Whether every node on its path is the draft's first guess."""


@dataclass(frozen=True)
class ChildProposal:
    """A possible child of an evaluated node."""

    token: int
    survival: float
    lead: bool
    """Whether it is the leading source's first guess."""


@dataclass(frozen=True)
class DecodeLatency:
    """Seconds of one decode by the number of nodes in it, as measured on this device."""

    seconds: tuple[tuple[int, float], ...]
    """(width, seconds), ascending"""

    @classmethod
    def measured(cls, seconds: Mapping[int, float]) -> DecodeLatency:
        return cls(tuple(sorted(seconds.items())))

    def of(self, width: int) -> float:
        """Linear between the widths measured and beyond the last one."""
        points = self.seconds
        if len(points) == 1 or width <= points[0][0]:
            return points[0][1] * max(1.0, width / points[0][0])
        right = min(max(1, bisect.bisect_left(points, (width, 0.0))), len(points) - 1)
        (w0, t0), (w1, t1) = points[right - 1], points[right]
        return max(t0, t0 + (t1 - t0) * (width - w0) / (w1 - w0))

    @property
    def widest(self) -> int:
        return self.seconds[-1][0]


def floor(plan: SpeculationPlan, widths: DecodeLatency, expected: float) -> float:
    """Least survival at which a node is worth a decode: the verifier's price, or the device's own time.

    Device time is worth E / R tokens a second (E: tokens that a step commits, R: its seconds), but only while the
    verifier waits for it: a decode that runs beside a step delays the answer to a Commit by half its length, and only
    if the Commit falls into it.
    """
    decode = widths.of(1)
    rate = expected / plan.step_s
    falls_into_it = min(1.0, decode / plan.step_s)
    return max(plan.min_acceptance, rate * decode * falls_into_it / 2)


def choose_leaves(leaves: Sequence[Leaf], plan: SpeculationPlan, widths: DecodeLatency, least: float) -> list[Leaf]:
    """The leaves to evaluate in one decode, best first: as many as give the most survival per second.

    A wide decode joins when its marginal survival pays for its marginal time, so t(W) decides between comb and
    best-first. The deepest leaf of the greedy spine goes along whenever it is worth a decode at all.
    """
    worth = [leaf for leaf in leaves if leaf.depth < plan.depth and _worth(leaf.survival, leaf, least)]
    if not worth:
        return []
    worth.sort(key=lambda leaf: (-leaf.survival, leaf.id))
    chosen = worth[: _best_count(worth, widths)]
    spine = next((leaf for leaf in worth if leaf.spine), None)
    if spine is not None and spine not in chosen:
        chosen = [spine, *chosen[:-1]] if len(chosen) == widths.widest else [*chosen, spine]
    return chosen


def _worth(survival: float, leaf: Leaf, least: float) -> bool:
    return survival >= least or (leaf.spine and leaf.depth < _SPINE_FLOOR)


def _best_count(leaves: Sequence[Leaf], widths: DecodeLatency) -> int:
    """n that maximises (survival of the n best) / t(n)."""
    best, best_rate, total = 1, 0.0, 0.0
    for n, leaf in enumerate(leaves[: widths.widest], start=1):
        total += leaf.survival
        rate = total / widths.of(n)
        if rate > best_rate * 1.0001:
            best, best_rate = n, rate
    return best


def choose_children(
    guesses: Sequence[ChildProposal], depth: int, spine: bool, plan: SpeculationPlan
) -> list[ChildProposal]:
    """The children to add below one parent, out of guesses by falling survival.

    depth: the children's. spine: whether the parent is on the greedy spine.
    """
    if depth > plan.depth or not plan.speculates:
        return []
    kept = [guess for guess in guesses[: plan.siblings] if guess.survival >= plan.min_acceptance]
    if spine and depth <= _SPINE_FLOOR and not any(guess.lead for guess in kept):
        kept += [guess for guess in guesses if guess.lead][:1]
    return kept


def worth_waiting(
    plan: SpeculationPlan, held: Sequence[float], next_gain: float, decode_s: float, elapsed_s: float
) -> bool:
    """Whether to draft on before the first nodes after a Commit go out, while the verifier waits for them.

    held: survival of the nodes that would go now. next_gain: survival that the next decode is expected to add.
    Sends when the marginal gain per second falls to the rate that sending now would have (twice it, see above).
    """
    if next_gain <= 0.0 or len(held) >= plan.nodes_per_step:
        return False
    if elapsed_s + decode_s > _DRAFT_WAIT_SHARE * plan.draft_wait_s:
        return False
    if not held:
        return True
    rate = (1.0 + sum(held)) / (plan.step_s + elapsed_s)
    return next_gain / decode_s > _WAIT_GAIN * rate


def send_interval(step_s: float) -> float:
    """Least seconds between two harvests that nobody waits for: more of them would only cost wake-ups."""
    return max(0.002, step_s / 4)


def departure(plan: SpeculationPlan, rtt_s: float, beat: float, earliest: float) -> float:
    """When nodes that nobody waits for should leave: one message a step, a while before it would miss the next one.

    beat: when a Commit came, whose verifier began its next step half a round trip before. Until then more is drafted
    for the same message, and of what the next Commit refutes nothing was sent. Where hardly any time is left before the
    message would miss a step, half of it is drafted in.
    """
    first = beat + (plan.step_s - rtt_s) % plan.step_s
    last = first + plan.step_s * max(0, math.ceil((earliest - first) / plan.step_s))
    return max(last - _EARLY * plan.step_s, (earliest + last) / 2)
