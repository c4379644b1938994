"""Grows the session's tree ahead of the verifier: one decode per step, without threads, sockets or a clock of its own.

The drafter keeps a tree of its own, since it works on another thread than the session's. The two agree by rule: the
same tokens are committed to both, and what this one offers names its parents as an Append does: by id, or as the
committed sequence at position `base`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from edge_agent.drafting import growth
from edge_agent.drafting.calibrated_source import NodeProposals
from edge_agent.drafting.growth import ChildProposal, DecodeLatency, Leaf, SpeculationPlan
from edge_agent.drafting.health import DraftHealth
from edge_agent.drafting.sources.base import DraftSource, DraftTask, NodeContext, Proposal
from outrider.core.acceptance.calibrator import Calibrator
from outrider.core.errors import Overloaded
from outrider.core.tree import ROOT, Node, TokenTree


@dataclass(frozen=True)
class DraftNode:
    """A node offered to the session. `parent` 0 is the committed sequence at the growth's `base`."""

    id: int
    parent: int
    token: int


@dataclass(frozen=True)
class DraftUpdate:
    """What the drafter has for the session, best first and ancestors before descendants."""

    base: int
    """Generated tokens that the drafter knew of."""
    nodes: tuple[DraftNode, ...]
    resting: bool
    """Nothing more will come before the next Commit."""


class Source(DraftSource, Protocol):
    """A draft source that also says which tokens it can evaluate."""

    def knows(self, token: int) -> bool: ...


@dataclass(frozen=True)
class CalibratedSource:
    """A source with what has been learned about it."""

    source: Source
    greedy: Calibrator
    sampled: Calibrator
    leads: bool = True
    """Whether its first guesses make the greedy spine."""

    def calibrator(self, task: DraftTask) -> Calibrator:
        """Margins of perturbed scores mean something else than margins of log-probabilities."""
        return self.greedy if task.sampling.greedy else self.sampled


@dataclass
class _Note:
    """What the drafter remembers about a node of its tree."""

    accept: float = 1.0
    """Probability that the target takes it if it takes the parent."""
    first: bool = True
    """Whether it is the leading source's first guess."""
    sent: bool = False
    evaluated: bool = False
    """Whether the model was asked for its children."""
    looked_up: bool = False
    guesses: dict[int, tuple[float, bool]] = field(default_factory=dict)
    """token -> (accept, whether it is the leading source's first guess) of possible children"""
    hearing: NodeProposals = field(default_factory=NodeProposals)
    """What was proposed for its children, to learn from when one is committed."""


@dataclass(frozen=True)
class _Standing:
    """A node as it stands now."""

    node: Node
    survival: float
    spine: bool


class Drafter:
    """One session's draft. model: the source that costs decodes, if any. lookup: one that costs nothing, if any.

    health: where its guesses are counted.
    """

    def __init__(
        self,
        model: CalibratedSource | None,
        lookup: CalibratedSource | None,
        widths: DecodeLatency,
        clock: Callable[[], float] = time.monotonic,
        health: DraftHealth | None = None,
    ) -> None:
        self._model = model
        self._lookup = lookup
        self._widths = widths
        self._health = health or DraftHealth()
        self._clock = clock
        self._decode_s = widths.of(1)
        self._expected = 2.0
        self._full = False
        self._task = DraftTask(prompt=())
        self._tree = TokenTree()
        self._notes: dict[int, _Note] = {ROOT: _Note()}
        self._next = 1
        self._committed_at = 0.0
        self._sent_at = 0.0
        self._told_resting = False
        self._chosen: list[_Standing] | None = None
        self.plan: SpeculationPlan = _NOTHING
        """May be replaced between steps."""

    @property
    def decode_s(self) -> float:
        """Seconds that one decode takes, lately."""
        return self._decode_s

    @property
    def awaited(self) -> bool:
        """Whether the verifier waits for nodes: it has none of ours."""
        return self.plan.waits and not any(self._notes[node.id].sent for node in self._tree)

    def begin(self, task: DraftTask, plan: SpeculationPlan) -> None:
        """Take a session over from its received tokens on."""
        self._task, self.plan = task, plan
        self._tree = TokenTree(len(task.received))
        self._notes = {ROOT: _Note()}
        self._next = 1
        self._new_root()
        for voice in self._voices():
            voice.source.begin(task)

    def advance(self, tokens: Sequence[int]) -> None:
        """Commit tokens: learn from them, and keep what descends from the last one."""
        path: list[int] = []
        for token in tokens:
            hearing = self._notes[ROOT].hearing
            hearing.learn(token)
            if (right := hearing.led(token)) is not None:
                self._health.heard(right)
            carried = self._tree.advance(token)
            self._notes[ROOT] = _Note() if carried is None else self._notes[carried]
            if carried is not None:
                path.append(carried)
        self._notes = {ROOT: self._notes[ROOT]} | {node.id: self._notes[node.id] for node in self._tree}
        self._expected += 0.1 * (len(tokens) - self._expected)
        self._new_root()
        for voice in self._voices():
            voice.source.advance(path, tokens)
        self._offer_again()

    def step(self) -> bool:
        """Evaluate the best leaves in one decode and add their children. False where nothing is worth it."""
        if not self.plan.speculates or self._full or self._tree.position >= self._task.max_tokens:
            return False
        if not self._notes[ROOT].evaluated:
            self._expand([_Standing(_root_node(self._tree), 1.0, True)])
            return True
        leaves = self._choose()
        if not leaves:
            return False
        begun = self._clock()
        try:
            self._expand(leaves)
        except Overloaded:
            self._full = True  # no cells or sequence ids until a Commit frees some
            return False
        self._decode_s += 0.1 * (self._clock() - begun - self._decode_s)
        return True

    def harvest(self, *, moved: bool) -> DraftUpdate | None:
        """What should go out now, None where it is better to draft on. moved: whether there may be more to draft."""
        survey = self._survey()
        unsent = [standing for standing in survey if not self._notes[standing.node.id].sent]
        awaited = len(unsent) == len(survey)
        if moved and (not unsent or (self._holds(unsent) if awaited else self._soon())):
            return None
        if not unsent and self._told_resting:
            return None
        unsent.sort(key=lambda standing: (-standing.survival, standing.node.id))
        for standing in unsent:
            self._notes[standing.node.id].sent = True
        self._told_resting = not moved
        self._sent_at = self._clock()
        nodes = tuple(DraftNode(s.node.id, s.node.parent, s.node.token) for s in unsent)
        return DraftUpdate(self._tree.position, nodes, resting=not moved)

    # --- what to do next

    def _choose(self) -> list[_Standing]:
        """The leaves that the next decode should evaluate."""
        if self._chosen is None:
            self._chosen = self._choose_afresh()
        return self._chosen

    def _choose_afresh(self) -> list[_Standing]:
        if self._model is None or self._room() <= 0:
            return []
        survey = {standing.node.id: standing for standing in self._survey()}
        leaves = [
            Leaf(s.node.id, s.survival, self._tree.depth(s.node.id), s.spine)
            for s in survey.values()
            if not self._notes[s.node.id].evaluated and self._expandable(s.node)
        ]
        least = growth.floor(self.plan, self._widths, self._expected)
        return [survey[leaf.id] for leaf in growth.choose_leaves(leaves, self.plan, self._widths, least)]

    def _holds(self, unsent: Sequence[_Standing]) -> bool:
        """Whether the verifier, which has nothing of ours, should wait for one decode more."""
        next_gain = _HIT_SHARE * sum(standing.survival for standing in self._choose())
        held = [standing.survival for standing in unsent]
        elapsed = self._clock() - self._committed_at
        return growth.worth_waiting(self.plan, held, next_gain, self._decode_s, elapsed)

    def _soon(self) -> bool:
        """Whether the last nodes went out so lately that more had better be collected first, and put in order."""
        return self._clock() - self._sent_at < growth.send_interval(self.plan.step_s)

    def _expandable(self, node: Node) -> bool:
        parent_done = self._notes[node.parent].evaluated
        known = self._model is not None and self._model.source.knows(node.token)
        return parent_done and known and node.token not in self._task.ends and node.position + 1 < self._task.max_tokens

    def _room(self) -> int:
        return self.plan.nodes - len(self._tree)

    # --- growing

    def _expand(self, standings: Sequence[_Standing]) -> None:
        """Ask the model for the children of these nodes and add those that are worth it."""
        spots = [self._spot(standing.node) for standing in standings]
        proposals = self._model.source.expand(spots) if self._model else [[] for _ in spots]
        for standing, proposed in zip(standings, proposals, strict=True):
            note = self._notes[standing.node.id]
            note.evaluated = True
            self._chosen = None
            if self._model is not None:
                self._hear(standing.node, self._model, proposed)
        for standing in standings:
            self._offer(standing)

    def _hear(self, parent: Node, voice: CalibratedSource, proposals: Sequence[Proposal]) -> None:
        """Rate the children anew: those that another voice proposed before, too."""
        note, depth = self._notes[parent.id], self._tree.depth(parent.id) + 1
        hear = note.hearing.lead if voice.leads else note.hearing.second
        hear(voice.calibrator(self._task), proposals, depth)
        note.guesses = note.hearing.guesses()
        for token, child in self._tree.children(parent.id).items():
            self._notes[child].accept = note.guesses[token][0]

    def _offer(self, parent: _Standing) -> None:
        """Add the children of a node that are worth it now, and what look-up knows below them."""
        todo = [parent]
        while todo and self._room() > 0:
            standing = todo.pop(0)
            self._consult_lookup(standing)
            todo.extend(self._add_children(standing))

    def _add_children(self, parent: _Standing) -> list[_Standing]:
        note = self._notes[parent.node.id]
        ranked = sorted(note.guesses.items(), key=lambda item: -item[1][0])
        guesses = [ChildProposal(token, parent.survival * accept, lead) for token, (accept, lead) in ranked]
        added = []
        depth = self._tree.depth(parent.node.id) + 1
        for guess in growth.choose_children(guesses, depth, parent.spine, self.plan):
            present = self._tree.child(parent.node.id, guess.token)
            accept = note.guesses[guess.token][0]
            if present is not None:
                self._notes[present].accept = max(self._notes[present].accept, accept)
            elif self._room() > 0:
                node = self._tree.add(self._next, parent.node.id, guess.token)
                self._notes[node.id] = _Note(accept, guess.lead)
                self._next += 1
                added.append(_Standing(node, guess.survival, parent.spine and guess.lead))
        return added

    def _consult_lookup(self, standing: _Standing) -> None:
        """Look-up costs nothing to speak of, so it is asked wherever it could matter."""
        node, note = standing.node, self._notes[standing.node.id]
        worth = standing.survival > self.plan.min_acceptance and node.position + 1 < self._task.max_tokens
        if self._lookup is None or note.looked_up or not worth or node.token in self._task.ends:
            return
        note.looked_up = True
        self._hear(node, self._lookup, self._lookup.source.expand([self._spot(node)])[0])

    def _offer_again(self) -> None:
        """After a Commit survival has risen and there is room: offer what was not worth it before."""
        self._chosen = None
        if not self.plan.speculates or not self._notes[ROOT].evaluated:
            return
        standings = [_Standing(_root_node(self._tree), 1.0, True), *self._survey()]
        for standing in sorted(standings, key=lambda s: -s.survival):
            self._offer(standing)

    # --- bookkeeping

    def _survey(self) -> list[_Standing]:
        """Every node with its survival, ancestors first."""
        survival, spine = {ROOT: 1.0}, {ROOT: True}
        found = []
        for node in self._tree:
            note = self._notes[node.id]
            survival[node.id] = survival[node.parent] * note.accept
            spine[node.id] = spine[node.parent] and note.first
            found.append(_Standing(node, survival[node.id], spine[node.id]))
        return found

    def _spot(self, node: Node) -> NodeContext:
        path = tuple(self._tree.path(node.id))
        return NodeContext(node.id, node.parent, node.token, self._tree.position + len(path), path)

    def _new_root(self) -> None:
        self._committed_at = self._clock()
        self._sent_at = 0.0
        self._chosen = None
        self._told_resting = False
        self._full = False

    def _voices(self) -> list[CalibratedSource]:
        return [voice for voice in (self._model, self._lookup) if voice is not None]


_HIT_SHARE = 0.8
"""Of a node's survival that its children have together, roughly."""
_NOTHING = SpeculationPlan(
    nodes=0, depth=0, nodes_per_step=0, min_acceptance=1.0, draft_wait_s=0.0, step_s=growth.DEFAULT_STEP_S
)


def _root_node(tree: TokenTree) -> Node:
    """The root in the shape of a node, for code that asks both alike."""
    return Node(ROOT, ROOT, -1, tree.position - 1)
