"""Merge the nodes that a session's next step may take: its device's, and those of the verifier's own sources.

The trees of all sources are merged by (parent, token), and a node is as probable as the surest of its sources says, by
what was measured of each of them in this session. The allocation policy takes the best of the merged nodes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import takewhile

from cloud_verifier.engine.stats import MovingAverage
from outrider.core.acceptance.node_acceptance import NodeAcceptance, ranked_by
from outrider.core.protocol.messages import Directive
from outrider.core.protocol.verifier import VerifierSession
from outrider.core.tree import ROOT, TokenTree
from outrider.core.verification import TreeBatch, Verified

DEVICE = "device"
"""The device among the sources of nodes."""
Ranked = list[tuple[float, int]]
"""(probability of acceptance, id) of nodes, the most probable first, ancestors before their descendants."""


class ProposedTree(TokenTree):
    """A token tree of one source, whose node ids count from 1; each node has a kind (NodeAcceptance)."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.kinds: dict[int, int] = {}
        """Node id -> kind."""

    def propose(self, parent: int, token: int, kind: int) -> int:
        """Add a node and return its id. The caller ensures that no sibling has the token."""
        node = self.add(len(self) + 1, parent, token)
        self.kinds[node.id] = kind
        return node.id


class MergedTree(TokenTree):
    """The union of several sources' trees for one step. Node ids count from 1 and mean nothing to the device."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.acceptance: dict[int, float] = {}
        """Node id -> probability that the node is committed if its parent is."""
        self.sources: dict[int, set[str]] = {}
        """Node id -> names of the sources that proposed it."""

    def merge(self, source: str, tree: TokenTree, acceptance: Mapping[int, float], wanted: Collection[int]) -> None:
        """Take in the wanted nodes of a tree, a set that holds the ancestors of each. acceptance: by the tree's ids."""
        ids = {ROOT: ROOT}
        for node in tree:
            if node.id not in wanted:
                continue
            parent = ids[node.parent]
            same = self.child(parent, node.token)
            if same is None:
                same = self.add(len(self) + 1, parent, node.token).id
                self.acceptance[same], self.sources[same] = 0.0, set()
            ids[node.id] = same
            self.acceptance[same] = max(self.acceptance[same], acceptance[node.id])
            self.sources[same].add(source)

    def led(self, path: Sequence[int], by: Set[str]) -> int:
        """Return how many of the first nodes of a path some sources would have led to by themselves."""
        return sum(1 for _ in takewhile(lambda node: by & self.sources[node], path))

    def outcome(self, source: str, evaluated: Sequence[int], path: Sequence[int]) -> SourceOutcome:
        """Return what a source has brought. path: the accepted ones of the evaluated nodes."""
        sources = self.sources
        return SourceOutcome(
            evaluated=sum(source in sources[node] for node in evaluated),
            accepted=sum(source in sources[node] for node in path),
            added=sum(source in sources[node] and DEVICE not in sources[node] for node in evaluated),
            gain=self.led(path, {DEVICE, source}) - self.led(path, {DEVICE}),
        )


@dataclass(slots=True)
class SourceOutcome:
    """Counts what one source of nodes has brought in one step of a session, whether others proposed the same or not."""

    evaluated: int = 0
    accepted: int = 0
    added: int = 0
    """Evaluated nodes that the device did not propose."""
    gain: int = 0
    """Accepted nodes beyond those that the device alone leads to."""


class PendingNodes:
    """Ranks the nodes of a session.

    ignored: number of the device's nodes that were found outside its window. most_together: the most nodes of all
    sources in a step. device: what the device's nodes brought in the last step. own: what each of the verifier's own
    sources brought. server_gain: mean number of accepted nodes of a step to which the verifier's own sources would lead
    without the device; a step in which a device had nodes and no source was asked tells nothing about it.
    """

    def __init__(self, protocol: VerifierSession, acceptance: NodeAcceptance, *, most: int, trees: bool) -> None:
        """acceptance: of the device's nodes. most: nodes of a session that a step of the target evaluates. trees:
        whether these may be more than one path."""
        self.ignored = 0
        self.device = SourceOutcome()
        self.own: dict[str, SourceOutcome] = {}
        self.server_gain = MovingAverage(0.1)
        self.most_together = min(protocol.limits.nodes, most)
        self.trees = trees
        self._most = most
        self._protocol = protocol
        self._acceptance = {DEVICE: acceptance}
        self._offered: Mapping[str, ProposedTree] = {}
        self._merged: MergedTree | None = None
        """The device's nodes and those that are offered for one step; None if none are."""
        self._ranked: Ranked | None = None
        """None after a change."""
        self._outside: set[int] = set()
        """Ids of the device's nodes that were found outside the window, so that each is counted once."""

    @property
    def tree(self) -> TokenTree:
        return self._protocol.tree if self._merged is None else self._merged

    @property
    def merged(self) -> bool:
        """Return whether nodes of the verifier's own sources stand beside the device's."""
        return self._merged is not None

    def most(self, directive: Directive) -> int:
        """Return the most nodes of the device that a step may take."""
        if not directive.window_depth:
            return 0
        return min(directive.nodes_per_step, directive.window_nodes, self._most)

    def acceptance_of(self, source: str, prior: NodeAcceptance) -> NodeAcceptance:
        """Return the acceptance of a source's nodes in this session. prior: where a new one starts."""
        if source not in self._acceptance:
            self._acceptance[source] = NodeAcceptance(prior)
        return self._acceptance[source]

    def offer(self, trees: Mapping[str, ProposedTree], directive: Directive) -> None:
        """Merge trees of the verifier's sources, by name, with the device's nodes for one step."""
        device = self._protocol.tree
        merged, found = MergedTree(device.position), self._acceptance[DEVICE].estimates(device)
        within = self._within_window(ranked_by(device, found), directive)[: self.most(directive)]
        merged.merge(DEVICE, device, found, {node for _, node in within})
        for name, tree in trees.items():
            merged.merge(name, tree, self._acceptance[name].estimates(tree, tree.kinds), tree.kinds)
        self._offered, self._merged = trees, merged
        self._ranked = self._evaluable(ranked_by(merged, merged.acceptance))

    def changed(self) -> None:
        """Drop the nodes of the verifier's sources, and rank anew: the device's nodes or its window have changed."""
        self._offered, self._merged, self._ranked = {}, None, None

    def best(self, count: int, directive: Directive) -> Ranked:
        """Return the most probable nodes."""
        if self._ranked is None:
            ranked = self._acceptance[DEVICE].ranked(self._protocol.tree)
            self._ranked = self._evaluable(self._within_window(ranked, directive))
        return self._ranked[:count]

    def of_device(self, node: int) -> bool:
        """Return whether the device proposed a node of the tree."""
        return self._merged is None or DEVICE in self._merged.sources[node]

    def learn(self, batch: TreeBatch, verified: Verified) -> None:
        """Learn from a step, before its tokens are committed, which nodes are accepted; drop those of the verifier's
        sources."""
        merged, led = self._merged, 0
        if merged is None:
            self.device, self.own = SourceOutcome(len(batch.ids), len(verified.rows)), {}
        else:
            path = [batch.ids[row - 1] for row in verified.rows]
            self.device = merged.outcome(DEVICE, batch.ids, path)
            self.own = {name: merged.outcome(name, batch.ids, path) for name in self._offered}
            led = merged.led(path, self._offered.keys())
        if self._offered or not batch.ids:
            self.server_gain.add(led)
        self._acceptance[DEVICE].learn(self._protocol.tree, verified.tokens)
        for name, tree in self._offered.items():
            self._acceptance[name].learn(tree, verified.tokens, tree.kinds)
        self.changed()

    def _within_window(self, ranked: Ranked, directive: Directive) -> Ranked:
        """Return the device's nodes that its directive allows, and count the others."""
        tree = self._protocol.tree
        beyond = tree.position + directive.window_depth
        near = [best for best in ranked if tree[best[1]].position < beyond]
        within = near[: directive.window_nodes]
        if self._outside or len(within) < len(ranked):
            outside = {node for _, node in ranked} - {node for _, node in within}
            self.ignored += len(outside - self._outside)
            self._outside = {node for node in self._outside | outside if node in tree}
        return within

    def _evaluable(self, ranked: Ranked) -> Ranked:
        """Return the nodes that the target can evaluate: of a target for chains those of the most probable path."""
        if self.trees:
            return ranked
        path, tip, tree = [], ROOT, self.tree
        for probability, node in ranked:
            if tree[node].parent == tip:
                path.append((probability, node))
                tip = node
        return path
