"""Grow a session's token tree ahead of the verifier, one decode per step, without threads, sockets or timers.

The drafter keeps a tree of its own, since it runs on another thread than the session. Both trees agree by rule: the
same tokens are committed to both, and a proposed node names its parent as an Append does, by id or as the committed
sequence at position `base`.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from edge_agent.drafting import growth
from edge_agent.drafting.calibrated_source import CalibratedSource, NodeProposals
from edge_agent.drafting.growth import DecodeLatency, RankedNode, SpeculationPlan
from edge_agent.drafting.sources.base import DraftTask, NodeContext, Proposal
from outrider.core.errors import Overloaded
from outrider.core.tree import ROOT, Node, TokenTree

_NEXT_LEVEL_ACCEPTANCE = 0.8
"""Fraction of a node's path acceptance that its children have together, roughly."""
_MODEL_SHARE = 0.5
"""Part of the tree's room that is kept for children of nodes that a model evaluated: free sources that are often half
right would otherwise fill the tree with guesses before the model has said what it knows better."""
_IDLE = SpeculationPlan(
    nodes=0, depth=0, nodes_per_step=0, min_acceptance=1.0, draft_wait_s=0.0, step_s=growth.DEFAULT_STEP_S
)


@dataclass(frozen=True)
class DraftNode:
    """A node that the drafter proposes to the session."""

    id: int
    parent: int
    """Id of another DraftNode, or 0 for the committed sequence at the update's `base`."""
    token: int


@dataclass(frozen=True)
class DraftUpdate:
    """Brings the session new nodes, by falling path acceptance and ancestors before descendants."""

    base: int
    """Generated tokens that the drafter had received."""
    nodes: tuple[DraftNode, ...]
    resting: bool
    """Whether nothing more will be drafted before the next commit."""


@dataclass
class _NodeState:
    """A node of the drafter's tree, with what was proposed for its children."""

    acceptance: float = 1.0
    """Probability that the target takes the node after its parent."""
    first: bool = True
    """Whether it is on the greedy spine if its parent is."""
    sent: bool = False
    evaluated: set[CalibratedSource] = field(default_factory=set)
    """The models that have evaluated it."""
    asked: bool = False
    """Whether the sources that cost nothing were asked for its children."""
    proposals: NodeProposals = field(default_factory=NodeProposals)

    @property
    def certain(self) -> bool:
        """Return whether the node is the only one that may follow its parent."""
        return self.acceptance == 1.0


class Drafter:
    """Drafts for one session at a time.

    sources: the best one first. Those with a latency are models: all of them are asked for the children of the same
    nodes, and what they propose is merged (SpecInfer, arXiv 2305.09781). All others, which cost next to nothing, are
    asked wherever their proposals could matter. Raises what a source raises; then the session is over for the drafter.
    """

    def __init__(self, sources: Sequence[CalibratedSource], clock: Callable[[], float] = time.monotonic) -> None:
        self._sources = tuple(sources)
        self._models = [one for one in sources if one.latency is not None]
        self._free = [one for one in sources if one.latency is None]
        self._clock = clock
        self.decode_s = self._latency(self._models).of(1) if self._models else 0.0
        """Moving average of the time in which the models evaluate nodes once."""
        self._tokens_per_step = 2.0
        self._task = DraftTask(prompt=())
        self._tree = TokenTree()
        self._states: dict[int, _NodeState] = {ROOT: _NodeState()}
        self._next_id = 1
        self._committed_at = 0.0
        self._sent_at = 0.0
        self._reported_resting = False
        self._refused = 0.0
        """Path acceptance for which a full tree had no node to displace since it began to grow; nodes that come take
        the places of lesser ones, so it has none for less."""
        self._chosen: list[RankedNode] | None = None
        """The leaves of the next decode; None where they must be chosen again."""
        self.plan = _IDLE

    def begin(self, task: DraftTask, plan: SpeculationPlan) -> None:
        """Read the sequence of a session; drop everything of an earlier one."""
        self._reset(task, plan)
        for model in self._models:
            model.source.begin(task)

    def end(self) -> None:
        """Drop the session and its text. Models keep it in their contexts, for a session that begins like it."""
        self._reset(DraftTask(prompt=()), _IDLE)

    def replan(self, plan: SpeculationPlan) -> None:
        """Draft by another plan; a drafter that rests looks again, and reports it if it still rests."""
        self.plan = plan
        self._chosen = None
        self._reported_resting = False

    def advance(self, tokens: Sequence[int]) -> None:
        """Commit tokens: learn from them, and keep what descends from the last one."""
        path = self._tree.advance(tokens)
        passed = [self._states[node] for node in (ROOT, *path)]
        for state, token in zip(passed, tokens, strict=False):
            state.proposals.learn(token)
        root = passed[-1] if len(path) == len(tokens) else _NodeState()
        self._states = {ROOT: root} | {node.id: self._states[node.id] for node in self._tree}
        self._tokens_per_step += 0.1 * (len(tokens) - self._tokens_per_step)
        self._on_new_root()
        for free in self._free:
            free.source.advance(path, tokens)
        for model in self._models:
            model.owe(path, tokens)
        self._propose_again()

    def step(self) -> bool:
        """Evaluate the best leaves in one decode and add their children; return False where none qualifies."""
        if not self.plan.speculates or self._tree.position >= self._task.max_tokens:
            return False
        if not self._models and not self._states[ROOT].asked:
            self._grow([self._root()])
            return True
        leaves = self._next_leaves()
        if not leaves:
            return False
        begun = self._clock()
        evaluated = self._evaluate(leaves)
        if leaves[0].node.id != ROOT:
            self.decode_s += 0.1 * (self._clock() - begun - self.decode_s)
        return evaluated

    def harvest(self, *, moved: bool) -> DraftUpdate | None:
        """Return what should be sent now; None where it is better to draft further first.

        moved: whether there may be more to draft before the next commit.
        """
        ranked = self._ranked()
        unsent = [item for item in ranked if not self._states[item.node.id].sent]
        if moved and (not unsent or self._should_collect(unsent, awaited=len(unsent) == len(ranked))):
            return None
        if not unsent and self._reported_resting:
            return None
        unsent.sort(key=lambda item: (-item.path_acceptance, item.node.id))
        for item in unsent:
            self._states[item.node.id].sent = True
        self._chosen = None  # in a full tree there may be nothing left to displace
        self._reported_resting = not moved
        self._sent_at = self._clock()
        nodes = tuple(DraftNode(item.node.id, item.node.parent, item.node.token) for item in unsent)
        return DraftUpdate(self._tree.position, nodes, resting=not moved)

    # --- what to do next

    def _next_leaves(self) -> list[RankedNode]:
        """Return the leaves that are worth evaluating next, ancestors first; none where none is."""
        if self._chosen is None:
            self._chosen = self._leaves()
        return self._chosen

    def _leaves(self) -> list[RankedNode]:
        models, states = self._awake(), self._states
        if not models:
            return []
        if any(model not in states[ROOT].evaluated for model in models):
            return [self._root()]  # nothing below it could be evaluated before
        ranked = self._ranked()
        if self._room() <= 0:
            displaced = self._weakest(ranked)
            least = displaced.path_acceptance / _NEXT_LEVEL_ACCEPTANCE if displaced is not None else 1.0
            ranked = [item for item in ranked if item.path_acceptance > least]
        leaves = [
            self._leaf(item)
            for item in ranked
            if not states[item.node.id].evaluated
            and self._may_have_children(item.node)
            and any(item.node.token < model.vocabulary for model in models)
        ]
        evaluated = {ROOT} | {id_ for id_, state in states.items() if state.evaluated}
        latency = self._latency(models)
        least = growth.least_acceptance(self.plan, latency, self._tokens_per_step)
        return growth.choose_leaves(leaves, evaluated, self.plan, latency, least)

    def _leaf(self, item: RankedNode) -> RankedNode:
        """Return a node with what an evaluation may add below it: nothing above a node that must follow, where both are
        evaluated in one decode."""
        certain = any(self._states[child].certain for child in self._tree.children(item.node.id).values())
        return replace(item, settled=True) if certain else item

    def _awake(self) -> list[CalibratedSource]:
        """Return the models that can be asked before the next commit."""
        return [model for model in self._models if not model.full]

    @staticmethod
    def _latency(models: Sequence[CalibratedSource]) -> DecodeLatency:
        return DecodeLatency.together([one.latency for one in models if one.latency is not None])

    def _should_collect(self, unsent: Sequence[RankedNode], *, awaited: bool) -> bool:
        """Return whether to draft more before these nodes go out. awaited: the verifier holds nothing of ours."""
        if not awaited:
            return self._clock() - self._sent_at < growth.send_interval(self.plan.step_s)
        next_gain = _NEXT_LEVEL_ACCEPTANCE * sum(leaf.gain for leaf in self._next_leaves())
        held, elapsed_s = [item.path_acceptance for item in unsent], self._clock() - self._committed_at
        return growth.should_wait(self.plan, held, next_gain, self.decode_s, elapsed_s)

    def _may_have_children(self, node: Node) -> bool:
        return node.token not in self._task.ends and node.position + 1 < self._task.max_tokens

    def _room(self) -> int:
        """Return how many nodes may still be added."""
        return self.plan.nodes - len(self._tree)

    # --- growing

    def _evaluate(self, leaves: Sequence[RankedNode]) -> bool:
        """Ask the models for the children of these nodes and add those that qualify; return whether one answered."""
        self._chosen = None
        for model in self._awake():
            try:
                self._ask(model, leaves)
            except Overloaded:
                model.full = True
        asked = {leaf.node.id for leaf in leaves if self._states[leaf.node.id].evaluated}
        if asked:
            self._grow([item for item in (self._root(), *self._kept()) if item.node.id in asked])
        return bool(asked)

    def _ask(self, model: CalibratedSource, leaves: Sequence[RankedNode]) -> None:
        """Let a model rate the children of the nodes that it can evaluate: it has evaluated what is above them, or does
        so in the same call."""
        model.catch_up()
        asked: dict[int, RankedNode] = {}
        for leaf in leaves:
            node = leaf.node
            if model in self._states[node.id].evaluated or node.token >= model.vocabulary:
                continue
            if node.id == ROOT or node.parent in asked or model in self._states[node.parent].evaluated:
                asked[node.id] = leaf
        if not asked:
            return
        contexts = [self._context(leaf.node, wanted=not leaf.settled) for leaf in asked.values()]
        for leaf, proposals in zip(asked.values(), model.source.expand(contexts), strict=True):
            self._states[leaf.node.id].evaluated.add(model)
            if not leaf.settled:
                self._rate(leaf, model, proposals)

    def _rate(self, parent: RankedNode, asked: CalibratedSource, proposals: Sequence[Proposal]) -> None:
        """Add a source's proposals for a node's children, and rate anew the children that exist already."""
        state, calibrator = self._states[parent.node.id], asked.calibrator(self._task)
        leads = asked in self._models or not self._models
        state.proposals.add(self._sources.index(asked), calibrator, proposals, parent.depth + 1, leads=leads)
        for token, child in self._tree.children(parent.node.id).items():
            self._states[child].acceptance, self._states[child].first = state.proposals.children[token]

    def _kept(self) -> list[RankedNode]:
        """Return the nodes, after a model has spoken, without those that do not qualify any more and were not sent."""
        kept = []
        for item in reversed(self._ranked()):
            state = self._states[item.node.id]
            needed = item.spine or state.sent or self._tree.children(item.node.id)
            if item.path_acceptance >= self.plan.min_acceptance or needed:
                kept.append(item)
            else:
                self._tree.remove(item.node.id)
                del self._states[item.node.id]
        return kept

    def _grow(self, parents: Sequence[RankedNode]) -> None:
        """Add the children of these nodes that qualify now, and what free sources know below them, best first."""
        queue = [(-parent.path_acceptance, parent.node.id, parent) for parent in parents]
        heapq.heapify(queue)
        self._refused = 0.0
        while queue:
            _, _, parent = heapq.heappop(queue)
            if self._room() <= 0 and parent.path_acceptance <= self._refused:
                break  # neither its children nor those of what follows displace any
            if parent.node.id not in self._states:
                continue  # displaced by a better node
            self._ask_free_sources(parent)
            for child in self._add_children(parent):
                heapq.heappush(queue, (-child.path_acceptance, child.node.id, child))

    def _ask_free_sources(self, parent: RankedNode) -> None:
        """Ask the sources that cost next to nothing, wherever their proposals could matter."""
        state = self._states[parent.node.id]
        useful = parent.path_acceptance > self.plan.min_acceptance and self._may_have_children(parent.node)
        if useful and not state.asked:
            state.asked = True
            nodes = [self._context(parent.node)]
            for free in self._free:
                self._rate(parent, free, free.source.expand(nodes)[0])

    def _add_children(self, parent: RankedNode) -> list[RankedNode]:
        """Add the children of one node that qualify; return the new ones."""
        state = self._states[parent.node.id]
        added = []
        for token in growth.choose_children(state.proposals.children, parent, self.plan):
            acceptance, first = state.proposals.children[token]
            path_acceptance = parent.path_acceptance * acceptance
            present = self._tree.child(parent.node.id, token) is not None
            known = acceptance == 1.0 or state.evaluated or not self._models
            if present or not (known or self._free_room() > 0):
                continue
            if self._room() <= 0 and not self._displace(path_acceptance):
                continue
            node = self._tree.add(self._next_id, parent.node.id, token)
            self._states[node.id] = _NodeState(acceptance, first)
            self._next_id += 1
            self._chosen = None
            added.append(RankedNode(node, parent.depth + 1, path_acceptance, parent.spine and first))
        return added

    def _displace(self, path_acceptance: float) -> bool:
        """Make room for a node by removing one that is worth less; return whether there was one."""
        if path_acceptance <= self._refused:
            return False
        weakest = self._weakest(self._ranked())
        if weakest is None or weakest.path_acceptance >= path_acceptance:
            self._refused = path_acceptance if weakest is not None else 1.0
            return False
        self._tree.remove(weakest.node.id)
        del self._states[weakest.node.id]
        return True

    def _weakest(self, ranked: Sequence[RankedNode]) -> RankedNode | None:
        """Return the node of the least path acceptance among those that may still go: leaves that are neither sent nor
        on the greedy spine."""
        leaves = [item for item in ranked if not (item.spine or self._tree.children(item.node.id))]
        unsent = [item for item in leaves if not self._states[item.node.id].sent]
        return min(unsent, key=lambda item: item.path_acceptance, default=None)

    def _free_room(self) -> int:
        """Return how many nodes may still be added below nodes that no model has evaluated, where there is one."""
        return int((1.0 - _MODEL_SHARE) * self.plan.nodes) - sum(
            not self._states[node.parent].evaluated for node in self._tree
        )

    def _propose_again(self) -> None:
        """Add what did not qualify before: after a commit path acceptances have risen, and there is room."""
        if self.plan.speculates and (self._states[ROOT].evaluated or self._states[ROOT].asked):
            self._grow([self._root(), *self._ranked()])

    # --- bookkeeping

    def _reset(self, task: DraftTask, plan: SpeculationPlan) -> None:
        """Drop everything of an earlier session, and let the free sources read the sequence of this one."""
        self._task, self.plan = task, plan
        self._tree = TokenTree(len(task.received))
        self._states = {ROOT: _NodeState()}
        self._next_id = 1
        self._on_new_root()
        for one in self._sources:
            one.path, one.tokens = [], []
        for free in self._free:
            free.source.begin(task)

    def _ranked(self) -> list[RankedNode]:
        """Return every node with its path acceptance, ancestors first."""
        ranked = {ROOT: self._root()}
        for node in self._tree:
            parent, state = ranked[node.parent], self._states[node.id]
            path_acceptance, spine = parent.path_acceptance * state.acceptance, parent.spine and state.first
            ranked[node.id] = RankedNode(node, parent.depth + 1, path_acceptance, spine)
        del ranked[ROOT]
        return list(ranked.values())

    def _root(self) -> RankedNode:
        """Return the root in the shape of a node."""
        return RankedNode(Node(ROOT, ROOT, -1, self._tree.position - 1), 0, 1.0, True)

    def _context(self, node: Node, *, wanted: bool = True) -> NodeContext:
        path = tuple(self._tree.path(node.id))
        return NodeContext(node.id, node.parent, node.token, self._tree.position + len(path), path, wanted)

    def _on_new_root(self) -> None:
        self._committed_at = self._clock()
        self._sent_at = 0.0
        self._chosen = None
        self._reported_resting = False
        for model in self._models:
            model.full = False
