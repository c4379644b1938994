"""Merge the nodes that a session's next step may take: its device's, and those of the verifier's own sources.

The trees of all sources are merged by (parent, token), and a node is as probable as the surest of its sources says, by
what was measured of each of them in this session. The allocation policy takes the best of the merged nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile

from cloud_verifier.engine.stats import MovingAverage
from outrider.core.acceptance.node_acceptance import EXPECTED, NodeAcceptance, ranked_by
from outrider.core.protocol.messages import Directive
from outrider.core.protocol.verifier import VerifierSession
from outrider.core.tree import ROOT, TokenTree
from outrider.core.verification import TreeBatch, Verified

DEVICE = "device"
"""The device among the sources of nodes."""
Ranked = list[tuple[float, int]]
"""(probability of acceptance, id) of nodes, the most probable first, ancestors before their descendants."""


def tenant_acceptance(expected: Sequence[Sequence[float]] = EXPECTED) -> Callable[[str], NodeAcceptance]:
    """Return a function that gives each tenant's estimate of node acceptance; that of all tenants is its prior.

    A new session of the tenant starts from it, and it learns from the session. The tenant that has begun no session for
    longest is forgotten first. expected: as for NodeAcceptance.
    """
    everyone = NodeAcceptance(expected=expected)
    return lru_cache(1024)(lambda tenant: NodeAcceptance(everyone, shared=True))


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

    def merge(self, source: str, tree: TokenTree, acceptance: Mapping[int, float]) -> None:
        """Take in the nodes of a tree whose acceptance is given, by id, with that of all their ancestors."""
        ids = {ROOT: ROOT}
        for node in tree:
            if node.id not in acceptance:
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
            levels=max((self.depth(node) for node in evaluated if source in sources[node]), default=0),
            added=sum(source in sources[node] and DEVICE not in sources[node] for node in evaluated),
            gain=self.led(path, {DEVICE, source}) - self.led(path, {DEVICE}),
        )


@dataclass(slots=True)
class SourceOutcome:
    """Counts what one source of nodes has brought in one step of a session, whether others proposed the same or not."""

    evaluated: int = 0
    accepted: int = 0
    levels: int = 0
    """Greatest depth of an evaluated node."""
    added: int = 0
    """Evaluated nodes that the device did not propose."""
    gain: int = 0
    """Accepted nodes beyond those that the device alone leads to."""


class PendingNodes:
    """Ranks the nodes that a session's next step may take.

    directive: that the device follows, whose nodes beyond its window are ignored. ignored: number of those that were.
    draft_wait_s: the directive's.
    most_together: the most nodes of all sources in a step. drafts: the trees that the verifier's sources have proposed
    since the last commit, by name; one without nodes of a source that found none. device_near: whether nodes of the
    device were there or expected when the sources were asked; None if they were not. device: what the device's nodes
    brought in the last step. own: what each of the verifier's own sources brought. server_gain: mean number of accepted
    nodes of a step to which the verifier's own sources would lead without the device; a step in which a device had
    nodes and no source was asked tells nothing about it.
    """

    def __init__(
        self,
        protocol: VerifierSession,
        acceptance: NodeAcceptance,
        directive: Directive,
        *,
        most: int,
        trees: bool,
    ) -> None:
        """acceptance: of the device's nodes. most: nodes of a session that a step of the target evaluates. trees:
        whether these may be more than one path."""
        self.ignored = 0
        self.device = SourceOutcome()
        self.own: dict[str, SourceOutcome] = {}
        self.server_gain = MovingAverage(0.1)
        self.most_together = min(protocol.limits.nodes, most)
        self.trees = trees
        self.drafts: dict[str, ProposedTree] = {}
        self.device_near: bool | None = None
        self._most = most
        self._protocol = protocol
        self._acceptance = {DEVICE: acceptance}
        self._merged: MergedTree | None = None
        """The device's nodes and `drafts`, for the step that begins; None if none were merged."""
        self._ranked: Ranked | None = None
        """None after a change."""
        self._outside: set[int] = set()
        """Ids of the device's nodes that were found outside the window, so that each is counted once."""
        self.follow(directive)

    @property
    def tree(self) -> TokenTree:
        return self._protocol.tree if self._merged is None else self._merged

    @property
    def most(self) -> int:
        """Return the most nodes that the step may take: of the device, or, once drafts were merged, of all sources."""
        if self._merged is not None:
            return self.most_together
        return self._most_of_device

    def follow(self, directive: Directive) -> None:
        """Follow another directive. Its fields are read once, since every step needs them."""
        self.directive = directive
        self.draft_wait_s = 1e-3 * directive.draft_wait_ms
        self._window_nodes, self._window_depth = directive.window_nodes, directive.window_depth
        most = min(directive.nodes_per_step, directive.window_nodes, self._most)
        self._most_of_device = most if directive.window_depth else 0
        self.changed()

    def acceptance_of(self, source: str, prior: NodeAcceptance) -> NodeAcceptance:
        """Return the acceptance of a source's nodes in this session. prior: where a new one starts."""
        if source not in self._acceptance:
            self._acceptance[source] = NodeAcceptance(prior)
        return self._acceptance[source]

    def merge_drafts(self) -> bool:
        """Merge what the verifier's sources drafted with the device's nodes, for one step; return whether there is
        any."""
        if not any(self.drafts.values()):
            return False
        self.changed()
        device = self._protocol.tree
        merged, found = MergedTree(device.position), self._acceptance[DEVICE].estimates(device)
        within = self._within_window(ranked_by(device, found))[: self.most]
        merged.merge(DEVICE, device, {node: found[node] for _, node in within})
        for name, tree in self.drafts.items():
            merged.merge(name, tree, self._acceptance[name].estimates(tree, tree.kinds))
        self._merged = merged
        self._ranked = self._evaluable(ranked_by(merged, merged.acceptance))
        return True

    def changed(self) -> None:
        """Rank anew, the device's nodes alone: they or their window have changed, or the step has ended."""
        self._merged, self._ranked = None, None

    def best(self, count: int) -> Ranked:
        """Return the most probable nodes."""
        if self._ranked is None:
            self._ranked = self._evaluable(self._within_window(self._acceptance[DEVICE].ranked(self._protocol.tree)))
        return self._ranked[:count]

    def learn(self, batch: TreeBatch, verified: Verified) -> None:
        """Learn from a step, before its tokens are committed, which nodes are accepted."""
        path = [batch.ids[row - 1] for row in verified.rows]
        if (merged := self._merged) is None:
            self.device, self.own = SourceOutcome(len(batch.ids), len(path), max(batch.depths, default=0)), {}
            if not batch.ids:
                self.server_gain.add(0)
        else:
            self.device = merged.outcome(DEVICE, batch.ids, path)
            self.own = {name: merged.outcome(name, batch.ids, path) for name in self.drafts}
            self.server_gain.add(merged.led(path, self.drafts.keys()))
            for name, tree in self.drafts.items():
                self._acceptance[name].learn(tree, verified.tokens, tree.kinds)
        self._acceptance[DEVICE].learn(self._protocol.tree, verified.tokens)

    def end_step(self) -> None:
        """Drop the nodes of the verifier's sources."""
        self.drafts, self.device_near = {}, None
        self.changed()

    def _within_window(self, ranked: Ranked) -> Ranked:
        """Return the device's nodes that its directive allows, and count the others."""
        if len(ranked) <= min(self._window_nodes, self._window_depth) and not self._outside:
            return ranked  # so few nodes are no deeper either
        tree = self._protocol.tree
        beyond = tree.position + self._window_depth
        near = [best for best in ranked if tree[best[1]].position < beyond]
        within = near[: self._window_nodes]
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
