"""Decide which nodes of the token tree to evaluate, which to propose and when to send them, as pure functions.

A node's path acceptance is the estimated probability that the target's own tokens lead through it: the product of the
acceptances along its path. A tree that grows by it is best-first. Where wide decodes are expensive it becomes a comb: a
greedy spine, with siblings that cost no decode of their own.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from outrider.core.protocol.messages import LEAST_ACCEPTANCE, Directive, SessionLimits
from outrider.core.tree import Node

DEFAULT_STEP_S = 0.010
"""Length of a verification step that has not been measured yet."""
_SPINE_FLOOR = 2
"""The greedy spine is kept to this depth whatever its acceptance, so that a wrong calibration can be corrected."""
_WAIT_GAIN = 2.0
"""Waiting must gain at this multiple of the current rate, since nodes that arrive during a step are not lost."""
_PROBE_STEPS, _PROBE_S = 4, 0.25
"""Where no step evaluates nodes, one message in so many steps, and in so many seconds, is enough: such nodes only
measure acceptance, and each message costs the verifier's front what a few rows cost its engine."""
_EARLY = 0.25
"""Fraction of a step by which a message should arrive before the next step: steps and links vary."""
_SIBLINGS = 3
"""Most children that are proposed for a node, unless the target evaluates fewer."""
_DRAFT_WAIT_SHARE = 0.6
"""Fraction of the verifier's draft wait that drafting may use; the rest is left for the way to the verifier."""


@dataclass(frozen=True)
class SpeculationPlan:
    """The verifier's directive within the session's limits, and what the device has measured."""

    nodes: int
    """Nodes that the tree may hold."""
    depth: int
    """Deepest level of the tree; a child of the root has depth 1."""
    nodes_per_step: int
    """Nodes that one verification step evaluates. With 0 a few nodes are drafted all the same, so that the verifier can
    measure their acceptance, and it waits for none of them."""
    min_acceptance: float
    """Least path acceptance at which a node is proposed."""
    draft_wait_s: float
    """Time that the verifier waits for nodes; 0 where the round trip is too long for it to wait at all."""
    step_s: float
    """Length of a verification step."""
    siblings: int = _SIBLINGS
    """Most children that are proposed for a node."""

    @classmethod
    def of(cls, directive: Directive, limits: SessionLimits, *, waits: bool = True) -> SpeculationPlan:
        """Return the plan of a directive, capped by the session's limits.

        waits: whether the verifier is near enough to wait for nodes.
        """
        return cls(
            nodes=min(directive.window_nodes, limits.nodes),
            depth=min(directive.window_depth, limits.depth),
            nodes_per_step=directive.nodes_per_step,
            min_acceptance=max(directive.min_acceptance, LEAST_ACCEPTANCE),
            draft_wait_s=directive.draft_wait_ms / 1000 if waits else 0.0,
            step_s=directive.step_ms / 1000 or DEFAULT_STEP_S,
            siblings=min(_SIBLINGS, limits.children or _SIBLINGS),
        )

    @property
    def pause_s(self) -> float:
        """Return the least time between two messages that the verifier does not wait for."""
        return 0.5 * self.step_s if self.nodes_per_step else max(_PROBE_STEPS * self.step_s, _PROBE_S)

    @property
    def waits(self) -> bool:
        """Return whether the verifier waits for nodes when it holds none."""
        return self.draft_wait_s > 0.0 and self.nodes_per_step > 0

    @property
    def speculates(self) -> bool:
        """Return whether nodes are drafted at all; otherwise the session does not speculate."""
        return self.nodes > 0 and self.depth > 0 and self.min_acceptance < 1.0


@dataclass(frozen=True)
class RankedNode:
    """Pairs a node of the token tree with its path acceptance."""

    node: Node
    depth: int
    """Levels below the last committed token; 0 for the root itself."""
    path_acceptance: float
    spine: bool = False
    """Whether every node on its path is the leading source's first proposal."""
    settled: bool = False
    """Whether its only child is known, so that it is evaluated for the sake of nodes below it alone."""

    @property
    def gain(self) -> float:
        """Return the path acceptance that its evaluation may add to the tree."""
        return 0.0 if self.settled else self.path_acceptance


@dataclass(frozen=True)
class DecodeLatency:
    """Holds how long a decode takes on this device, by the number of nodes in it."""

    seconds: tuple[tuple[int, float], ...]
    """(nodes, seconds), ascending."""

    @classmethod
    def together(cls, several: Sequence[DecodeLatency]) -> DecodeLatency:
        """Return how long decodes of the same nodes take one after another, of at least one model."""
        if len(several) == 1:
            return several[0]
        return cls(tuple((nodes, sum(one.of(nodes) for one in several)) for nodes, _ in several[0].seconds))

    def of(self, nodes: int) -> float:
        """Return the seconds of a decode of so many nodes, by linear inter- and extrapolation."""
        points = self.seconds
        if len(points) == 1 or nodes <= points[0][0]:
            return points[0][1] * max(1.0, nodes / points[0][0])
        right = min(max(1, bisect.bisect_left(points, (nodes, 0.0))), len(points) - 1)
        (w0, t0), (w1, t1) = points[right - 1], points[right]
        return max(t0, t0 + (t1 - t0) * (nodes - w0) / (w1 - w0))

    @property
    def widest(self) -> int:
        """Return the most nodes whose decode was measured."""
        return self.seconds[-1][0]


def least_acceptance(plan: SpeculationPlan, latency: DecodeLatency, tokens_per_step: float) -> float:
    """Return the path acceptance at which a node pays for its decode: `min_acceptance`, or more on a slow device.

    The device's time costs E / R tokens a second (E: tokens that a step commits, R: its seconds), but only while the
    verifier waits for it: a decode that runs beside a step delays the answer to a commit by half its length, and only
    if the commit falls into it.
    """
    decode_s = latency.of(1)
    overlap = min(1.0, decode_s / plan.step_s)
    return max(plan.min_acceptance, tokens_per_step / plan.step_s * decode_s * overlap / 2)


def choose_leaves(
    leaves: Sequence[RankedNode], evaluated: Container[int], plan: SpeculationPlan, latency: DecodeLatency, least: float
) -> list[RankedNode]:
    """Return the nodes to evaluate in one decode, ancestors first: as many as gain the most per second, best first.

    A node joins when its gain pays for the time that it adds to the decode, so t(W) decides between a comb and a
    best-first tree. With a node come those above it that are not evaluated either, as a run from free sources (cascade
    speculative drafting, arXiv 2312.11462) or of tokens that must follow: a chain, since a node that is new in a decode
    has one child in it. The deepest leaf of the greedy spine joins whenever it qualifies for a decode at all.

    leaves: the nodes that are not evaluated and could be. evaluated: ids of those that are, and ROOT.
    least: gain that a leaf needs to be evaluated for its own sake.
    """
    by_id = {leaf.node.id: leaf for leaf in leaves}
    qualified = [leaf for leaf in leaves if leaf.depth < plan.depth and _qualifies(leaf, least)]
    qualified.sort(key=lambda leaf: (-leaf.gain, leaf.node.id))
    chosen: list[RankedNode] = []
    best, best_rate = chosen, 0.0
    for leaf in qualified:
        chain = _chain(leaf, by_id, evaluated, chosen)
        if best and len(chosen) + len(chain) > latency.widest:
            break
        if chain:
            chosen = [*chosen, *chain]
            rate = sum(one.gain for one in chosen) / latency.of(len(chosen))
            if rate > best_rate * 1.0001:
                best, best_rate = chosen, rate
    spine = next((leaf for leaf in qualified if leaf.spine), None)
    if spine is not None and _chain(spine, by_id, evaluated, best):
        chain = _chain(spine, by_id, evaluated, [])
        best = [*chain, *(one for one in best if one not in chain)][: max(latency.widest, len(chain))]
    return best


def _qualifies(leaf: RankedNode, least: float) -> bool:
    return not leaf.settled and (leaf.gain >= least or (leaf.spine and leaf.depth < _SPINE_FLOOR))


def _chain(
    leaf: RankedNode, leaves: Mapping[int, RankedNode], evaluated: Container[int], chosen: Sequence[RankedNode]
) -> list[RankedNode]:
    """Return what a decode of the chosen nodes must evaluate besides for the sake of one more, ancestors first.

    It is empty if the node is chosen already or cannot be evaluated in this decode.
    """
    taken, continued = {one.node.id for one in chosen}, {one.node.parent for one in chosen}
    if leaf.node.id in taken:
        return []
    chain = [leaf]
    while (above := chain[0].node.parent) not in evaluated:
        if above in taken:
            return [] if above in continued else chain
        if above not in leaves:
            return []
        chain.insert(0, leaves[above])
    return chain


def choose_children(children: Mapping[int, tuple[float, bool]], parent: RankedNode, plan: SpeculationPlan) -> list[int]:
    """Return the tokens to add below a node.

    children: token -> (acceptance given the parent, whether it is the leading source's first proposal).
    """
    if parent.depth >= plan.depth or not plan.speculates:
        return []
    ranked = sorted(children, key=lambda token: -children[token][0])
    likely = [token for token in ranked if parent.path_acceptance * children[token][0] >= plan.min_acceptance]
    kept = likely[: plan.siblings]
    alone = plan.siblings == 1 and kept
    if parent.spine and parent.depth < _SPINE_FLOOR and not alone and not any(children[token][1] for token in kept):
        kept += [token for token in ranked if children[token][1]][:1]
    return kept


def should_wait(
    plan: SpeculationPlan, held: Sequence[float], next_gain: float, decode_s: float, elapsed_s: float
) -> bool:
    """Return whether to draft further before the first nodes after a commit are sent, while the verifier waits.

    held: path acceptances of the nodes that would be sent now. next_gain: their sum that the next decode should add.
    Waiting ends when its marginal gain per second falls to twice the rate that sending now would have.
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
    """Return the least seconds between two updates that the verifier does not wait for: more would cost wake-ups."""
    return max(0.002, step_s / 4)


def departure_time(plan: SpeculationPlan, rtt_s: float, step_began: float, earliest: float) -> float:
    """Return when nodes that the verifier does not wait for should leave: once a step, just in time for the next one.

    Until then more is drafted for the same message, and nothing is sent that the next commit refutes. Where little time
    is left before the message would miss a step, half of it is used for drafting.
    step_began: arrival of a commit, whose verifier began its next step half a round trip earlier.
    earliest: the message must not leave before. All times are of one clock, in seconds.
    """
    first = step_began + (plan.step_s - rtt_s) % plan.step_s
    last = first + plan.step_s * max(0, math.ceil((earliest - first) / plan.step_s))
    return max(last - _EARLY * plan.step_s, (earliest + last) / 2)
