"""Grow a session's token tree ahead of the verifier, one decode per step, without threads, sockets or timers.

The drafter keeps a tree of its own, since it runs on another thread than the session. Both trees agree by rule: the
same tokens are committed to both, and a proposed node names its parent as an Append does, by id or as the committed
sequence at position `base`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edge_agent.drafting import growth
from edge_agent.drafting.calibrated_source import CalibratedSource, NodeProposals
from edge_agent.drafting.growth import ChildProposal, DecodeLatency, RankedNode, SpeculationPlan
from edge_agent.drafting.health import DraftHealth
from edge_agent.drafting.sources.base import DraftTask, NodeContext, Proposal
from outrider.core.errors import Overloaded
from outrider.core.tree import ROOT, Node, TokenTree

_NEXT_LEVEL_ACCEPTANCE = 0.8
"""Fraction of a node's path acceptance that its children have together, roughly."""
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
    """Whether it is the leading source's first proposal."""
    sent: bool = False
    evaluated: bool = False
    """Whether the model was asked for its children."""
    looked_up: bool = False
    """Whether the lookup source was asked for its children."""
    proposals: NodeProposals = field(default_factory=NodeProposals)

    @property
    def certain(self) -> bool:
        """Return whether the node is the only one that may follow its parent."""
        return self.acceptance == 1.0


class Drafter:
    """Drafts for one session at a time.

    model: the source whose evaluations cost decodes, if any. lookup: a source that costs nothing, if any.
    health: counts the first proposals that were accepted.
    """

    def __init__(
        self,
        model: CalibratedSource | None,
        lookup: CalibratedSource | None,
        latency: DecodeLatency,
        clock: Callable[[], float] = time.monotonic,
        health: DraftHealth | None = None,
    ) -> None:
        self._model = model
        self._lookup = lookup
        self._latency = latency
        self._health = health or DraftHealth()
        self._clock = clock
        self.decode_s = latency.of(1)
        """Moving average of the duration of a decode."""
        self._tokens_per_step = 2.0
        self._context_full = False
        self._task = DraftTask(prompt=())
        self._tree = TokenTree()
        self._states: dict[int, _NodeState] = {ROOT: _NodeState()}
        self._next_id = 1
        self._committed_at = 0.0
        self._sent_at = 0.0
        self._reported_resting = False
        self._chosen: list[RankedNode] | None = None
        """The leaves of the next decode; None where they must be chosen again."""
        self.plan = _IDLE

    @property
    def awaited(self) -> bool:
        """Return whether the verifier waits for nodes, since it holds none of this drafter's."""
        return self.plan.waits and not any(self._states[node.id].sent for node in self._tree)

    def begin(self, task: DraftTask, plan: SpeculationPlan) -> None:
        """Read the sequence of a session; drop everything of an earlier one."""
        self._task, self.plan = task, plan
        self._tree = TokenTree(len(task.received))
        self._states = {ROOT: _NodeState()}
        self._next_id = 1
        self._on_new_root()
        for calibrated in self._sources():
            calibrated.source.begin(task)

    def replan(self, plan: SpeculationPlan) -> None:
        """Draft by another plan; a drafter that rests looks again, and reports it if it still rests."""
        self.plan = plan
        self._chosen = None
        self._reported_resting = False

    def advance(self, tokens: Sequence[int]) -> None:
        """Commit tokens: learn from them, and keep what descends from the last one."""
        path: list[int] = []
        for token in tokens:
            proposals = self._states[ROOT].proposals
            proposals.learn(token)
            if (accepted := proposals.predicted(token)) is not None:
                self._health.count(accepted)
            carried = self._tree.advance(token)
            self._states[ROOT] = _NodeState() if carried is None else self._states[carried]
            if carried is not None:
                path.append(carried)
        self._states = {ROOT: self._states[ROOT]} | {node.id: self._states[node.id] for node in self._tree}
        self._tokens_per_step += 0.1 * (len(tokens) - self._tokens_per_step)
        self._on_new_root()
        for calibrated in self._sources():
            calibrated.source.advance(path, tokens)
        self._propose_again()

    def step(self) -> bool:
        """Evaluate the best leaves in one decode and add their children; return False where none qualifies."""
        if not self.plan.speculates or self._context_full or self._tree.position >= self._task.max_tokens:
            return False
        if not self._states[ROOT].evaluated:
            self._expand([self._root()])
            return True
        leaves = self._leaves()
        if not leaves:
            return False
        begun = self._clock()
        try:
            self._expand(leaves)
        except Overloaded:
            self._context_full = True  # no cells or sequence ids before a commit frees some
            return False
        self.decode_s += 0.1 * (self._clock() - begun - self.decode_s)
        return True

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
        self._reported_resting = not moved
        self._sent_at = self._clock()
        nodes = tuple(DraftNode(item.node.id, item.node.parent, item.node.token) for item in unsent)
        return DraftUpdate(self._tree.position, nodes, resting=not moved)

    # --- what to do next

    def _leaves(self) -> list[RankedNode]:
        """Return the leaves that the next decode should evaluate."""
        if self._chosen is None:
            self._chosen = []
            if self._model is not None and self._room() > 0:
                leaves = [item for item in self._ranked() if item.rows and self._expandable(item.node)]
                least = growth.least_acceptance(self.plan, self._latency, self._tokens_per_step)
                self._chosen = growth.choose_leaves(leaves, self.plan, self._latency, least)
        return self._chosen

    def _should_collect(self, unsent: Sequence[RankedNode], *, awaited: bool) -> bool:
        """Return whether to draft more before these nodes go out. awaited: the verifier holds nothing of ours."""
        if not awaited:
            return self._clock() - self._sent_at < growth.send_interval(self.plan.step_s)
        next_gain = _NEXT_LEVEL_ACCEPTANCE * sum(leaf.path_acceptance for leaf in self._leaves())
        held, elapsed_s = [item.path_acceptance for item in unsent], self._clock() - self._committed_at
        return growth.should_wait(self.plan, held, next_gain, self.decode_s, elapsed_s)

    def _expandable(self, node: Node) -> bool:
        if self._states[node.id].evaluated or not self._may_have_children(node):
            return False
        # Above a node that must follow there is nothing to choose: both are evaluated in one decode.
        return not any(self._states[child].certain for child in self._tree.children(node.id).values())

    def _may_have_children(self, node: Node) -> bool:
        return node.token not in self._task.ends and node.position + 1 < self._task.max_tokens

    def _room(self) -> int:
        """Return how many nodes may still be added."""
        return self.plan.nodes - len(self._tree)

    # --- growing

    def _expand(self, parents: Sequence[RankedNode]) -> None:
        """Ask the model for the children of these nodes and add those that qualify."""
        nodes = [self._context(parent.node) for parent in parents]
        if self._model is not None:
            nodes = [one for node in nodes for one in (*self._unevaluated_above(node), node)]
            proposed = dict(zip((node.id for node in nodes), self._model.source.expand(nodes), strict=True))
            for parent in parents:
                self._rate(parent, self._model, proposed[parent.node.id])
        self._chosen = None
        for node in nodes:
            self._states[node.id].evaluated = True
        for parent in parents:
            self._propose(parent)

    def _unevaluated_above(self, node: NodeContext) -> list[NodeContext]:
        """Return the nodes between the next evaluated one above and this one, ancestors first."""
        above: list[NodeContext] = []
        while node.parent != ROOT and not self._states[node.parent].evaluated:
            node = self._context(self._tree[node.parent])
            above.insert(0, node)
        return above

    def _rate(self, parent: RankedNode, calibrated: CalibratedSource, proposals: Sequence[Proposal]) -> None:
        """Add a source's proposals for a node's children, and rate anew the children that exist already."""
        state = self._states[parent.node.id]
        state.proposals.add(calibrated.calibrator(self._task), proposals, parent.depth + 1, leads=calibrated.leads)
        for token, child in self._tree.children(parent.node.id).items():
            self._states[child].acceptance = state.proposals.children[token][0]

    def _propose(self, parent: RankedNode) -> None:
        """Add the children of a node that qualify now, and what lookup knows below them."""
        queue = [parent]
        while queue and self._room() > 0:
            parent = queue.pop(0)
            self._look_up(parent)
            queue.extend(self._add_children(parent))

    def _add_children(self, parent: RankedNode) -> list[RankedNode]:
        """Add the children of one node that qualify; return the new ones."""
        known = self._states[parent.node.id].proposals.children
        ranked = sorted(known.items(), key=lambda item: -item[1][0])
        proposals = [ChildProposal(token, parent.path_acceptance * own, first) for token, (own, first) in ranked]
        added = []
        for child in growth.choose_children(proposals, parent.depth + 1, parent.spine, self.plan):
            acceptance = known[child.token][0]
            present = self._tree.child(parent.node.id, child.token)
            if present is not None:
                self._states[present].acceptance = max(self._states[present].acceptance, acceptance)
            elif self._room() > 0:
                node = self._tree.add(self._next_id, parent.node.id, child.token)
                self._states[node.id] = _NodeState(acceptance, child.leading)
                self._next_id += 1
                added.append(RankedNode(node, parent.depth + 1, child.path_acceptance, parent.spine and child.leading))
        return added

    def _look_up(self, parent: RankedNode) -> None:
        """Ask the lookup source wherever its proposals could matter, since that costs next to nothing."""
        state = self._states[parent.node.id]
        useful = parent.path_acceptance > self.plan.min_acceptance and self._may_have_children(parent.node)
        if self._lookup is not None and useful and not state.looked_up:
            state.looked_up = True
            self._rate(parent, self._lookup, self._lookup.source.expand([self._context(parent.node)])[0])

    def _propose_again(self) -> None:
        """Add what did not qualify before: after a commit path acceptances have risen, and there is room."""
        if self.plan.speculates and self._states[ROOT].evaluated:
            for parent in sorted([self._root(), *self._ranked()], key=lambda item: -item.path_acceptance):
                self._propose(parent)

    # --- bookkeeping

    def _ranked(self) -> list[RankedNode]:
        """Return every node with its path acceptance, ancestors first."""
        ranked = {ROOT: self._root()}
        for node in self._tree:
            parent, state = ranked[node.parent], self._states[node.id]
            path_acceptance, spine = parent.path_acceptance * state.acceptance, parent.spine and state.first
            rows = 1 if self._states[node.parent].evaluated else parent.rows + 1 if state.certain and parent.rows else 0
            if self._model is None or not self._model.source.knows(node.token):
                rows = 0
            ranked[node.id] = RankedNode(node, parent.depth + 1, path_acceptance, spine, rows)
        del ranked[ROOT]
        return list(ranked.values())

    def _root(self) -> RankedNode:
        """Return the root in the shape of a node."""
        return RankedNode(Node(ROOT, ROOT, -1, self._tree.position - 1), 0, 1.0, True, rows=0)

    def _context(self, node: Node) -> NodeContext:
        path = tuple(self._tree.path(node.id))
        return NodeContext(node.id, node.parent, node.token, self._tree.position + len(path), path)

    def _on_new_root(self) -> None:
        self._committed_at = self._clock()
        self._sent_at = 0.0
        self._chosen = None
        self._reported_resting = False
        self._context_full = False

    def _sources(self) -> list[CalibratedSource]:
        return [calibrated for calibrated in (self._model, self._lookup) if calibrated is not None]
