"""Draft in rounds, as other systems for edge and cloud do, instead of streaming nodes to the verifier.

In a round the device drafts, sends everything in one message, and sends no more before it is answered. The sources,
the growth of trees and the protocol are the product's. The verifier must evaluate a whole tree in one step and wait for
the next one: by its own setting (DIRECTIVE), which the coordinator must leave alone, and as a paced one that
`waits` (benchmarks.support.paced_engine).

SpecEdge (NeurIPS 2025, arXiv 2505.17052; repository kaist-ina/specedge) drafts on meanwhile, below one head: where the
likeliest path ends, and there below the likeliest next token. What it has drafted is part of the next round if the
answer is that path and that token. UCB-SpecStop (benchmarks.support.ucb_specstop) drafts nothing meanwhile, and chooses
how many levels a round has. Ours is what neither leaves open. SpecEdge's trees have numbers of levels set by hand; here
a round goes on being drafted while another decode gains more tokens a second than the round so far, and its head's tree
grows until the answer comes, so that no setting is to blame for a distance.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from benchmarks.support.ucb_specstop import UcbSpecStop
from edge_agent.drafting.calibrated_source import CalibratedSource
from edge_agent.drafting.drafter import Drafter, DraftUpdate
from edge_agent.drafting.growth import RankedNode, SpeculationPlan
from edge_agent.drafting.sources.base import DraftTask
from outrider.core.protocol.messages import Directive
from outrider.core.tree import ROOT

NODES = 32
"""Nodes of a round's tree, and of what is drafted while it is verified, as in SpecEdge's example."""
DIRECTIVE = Directive(window_nodes=2 * NODES, window_depth=32, nodes_per_step=NODES, draft_wait_ms=10_000)
"""The verifier's own setting: a tree is one step, and no step begins without one, however long drafting takes."""
_NEXT_LEVEL = 0.8
"""Share of the leaves' path acceptance that the next level has together, as the product's drafter assumes."""


class RoundDrafter(Drafter):
    """Drafts in rounds. trip_s: round trip to the verifier. bandit: chooses each round's levels, and then nothing is
    drafted meanwhile; None for SpecEdge's scheme."""

    def __init__(self, sources: Sequence[CalibratedSource], trip_s: float, bandit: UcbSpecStop | None = None) -> None:
        super().__init__(sources)
        self._trip_s = trip_s
        self._bandit = bandit
        self._directed = self.plan
        self._levels = 0
        """Levels of this round by the bandit."""
        self._rounds = 0
        self._in_flight = False
        """Whether a request is under way."""
        self._head = ROOT
        """The end of the likeliest path, below which is drafted while a request is in flight."""

    def begin(self, task: DraftTask, plan: SpeculationPlan) -> None:
        super().begin(task, plan)
        self._directed, self._rounds = plan, 0
        self._begin_round()

    def replan(self, plan: SpeculationPlan) -> None:
        """Draft by another plan. The part of a plan that holds now depends on the round."""
        self._directed = plan
        if not self._unanswered():
            self._in_flight = False  # only that nothing was to be drafted has been said
        super().replan(self._round_plan())

    def advance(self, tokens: Sequence[int]) -> None:
        """Take in an answer, which ends the round, or tokens that were on their way before the request arrived."""
        seconds = self._clock() - self._committed_at
        self._head = ROOT
        super().replan(self._round_plan())  # what survives is judged as part of a round again
        super().advance(tokens)
        if self._unanswered():
            self._draft_ahead()
            return
        if self._bandit is not None and self._rounds:  # the first answer was that to the prompt
            self._bandit.observe(self._levels, seconds, len(tokens))
        self._rounds += 1
        self._begin_round()

    def step(self) -> bool:
        if self._in_flight and self._head == ROOT:
            return False
        return super().step()

    def harvest(self, *, moved: bool) -> DraftUpdate | None:
        """Return the round's tree once it is drafted; nothing more before it is answered."""
        if self._in_flight or (moved and self._gains_more()):
            return None
        update = super().harvest(moved=False)
        if update is not None:
            self._in_flight = True
            self._draft_ahead()
        return update

    def _begin_round(self) -> None:
        self._in_flight, self._head = False, ROOT
        self._levels = self._bandit.choose() if self._bandit is not None else 0
        super().replan(self._round_plan())

    def _round_plan(self) -> SpeculationPlan:
        """Return the plan of what is drafted now, by which a step takes a whole round."""
        plan = replace(self._directed, step_s=self._directed.step_s + self._trip_s)
        if self._head != ROOT:
            # The device has nothing better to do, so nodes need only be likely where the head is right.
            return replace(plan, min_acceptance=plan.min_acceptance * self._path_acceptance(self._head))
        depth = min(plan.depth, self._levels or plan.depth)
        return replace(plan, nodes=min(plan.nodes, NODES), depth=depth)

    def _gains_more(self) -> bool:
        """Return whether another decode pays before the round's tree is sent."""
        leaves, ranked = self._next_decode()[1], self._ranked()
        if not leaves or len(ranked) >= NODES:
            return False
        if self._levels:
            return max((item.depth for item in ranked), default=0) < self._levels
        gain = _NEXT_LEVEL * sum(leaf.gain for leaf in leaves)
        tokens, elapsed_s = 1.0 + sum(item.path_acceptance for item in ranked), self._clock() - self._committed_at
        return gain / self.decode_s > tokens / (self.plan.step_s + elapsed_s)

    def _draft_ahead(self) -> None:
        """Begin to draft below the end of the likeliest path, unless a bandit is to choose the rounds."""
        if self._bandit is not None:
            return
        ends = [item for item in self._ranked() if not self._tree.children(item.node.id)]
        ends = [item for item in ends if self._may_have_children(item.node)]
        if not ends:
            return
        head = max(ends, key=lambda item: item.path_acceptance)
        self._head = head.node.id
        super().replan(self._round_plan())
        self._grow([head])  # by the lower bound, if the model has evaluated it

    def _leaves(self, model: Any, leads: bool, ranked: Sequence[RankedNode]) -> list[RankedNode]:
        return super()._leaves(model, leads, self._ahead(ranked) if self._head != ROOT else ranked)

    def _ahead(self, ranked: Sequence[RankedNode]) -> list[RankedNode]:
        """Return the head and the nodes at and below its likeliest child."""
        children = self._tree.children(self._head).values()
        below = {max(children, key=lambda child: self._states[child].acceptance)} if children else set()
        kept = []
        for item in ranked:  # ancestors first
            if item.node.parent in below:
                below.add(item.node.id)
            if item.node.id in below or item.node.id == self._head:
                kept.append(item)
        return kept

    def _unanswered(self) -> bool:
        """Return whether the verifier has, or is about to have, nodes that it may still accept."""
        return any(self._states[node.id].sent for node in self._tree)

    def _path_acceptance(self, node: int) -> float:
        return next(item.path_acceptance for item in self._ranked() if item.node.id == node)
