"""Estimate how likely the next verification step is to commit a pending node, by the verifier's own statistics.

A node is described by its kind and its order among its siblings. The kind of a device's node is its depth below the
last committed token: nothing that a device says of its nodes counts. The verifier's own sources of nodes say of which
kind each of theirs is, by how sure they are. The probability of a node is the product of those along its path, as in
best-first growth of a draft tree (EAGLE-2, arXiv 2406.16858). Every child of a committed token is an observation,
whether or not it was evaluated: the target's token is known, so a session whose nodes are not worth evaluating goes on
being measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import islice
from operator import itemgetter

from outrider.core.tree import ROOT, TokenTree

_DEPTHS = (1, 2, 3, 4, 6, 9)
"""Greatest depth of each class; the last class is open."""
KINDS = len(_DEPTHS) + 1
"""Number of kinds of nodes, whose estimates differ: the classes of depth, or what the verifier's own sources say."""
_CLASS = [bisect_left(_DEPTHS, depth) for depth in range(_DEPTHS[-1] + 2)]
"""The class of each depth; greater depths are in the last one."""
_PRIOR = (0.6, 0.15, 0.07, 0.03)
"""Probability of the first sibling, the second, and so on, before anything is observed."""
_ORDERS = len(_PRIOR)
EXPECTED: Sequence[Sequence[float]] = KINDS * (_PRIOR,)
"""The same by kind, whatever the kind."""
SURER: Sequence[Sequence[float]] = tuple(
    tuple(min(0.9, share * p) for p in _PRIOR) for share in (0.4, 0.6, 0.8, 1.0, 1.15, 1.3, 1.5)
)
"""The same, for sources whose kinds are by rising certainty."""
_PRIOR_WEIGHT = 8.0
"""Observations that the prior counts as."""
_MEMORY = 40.0
"""Observations of one class over which those of a session fade by a factor of e: acceptance changes with the text."""
_SHARED_MEMORY = 1000.0
"""The same for observations of many sessions."""
_REFRESH = 32
"""Observations after which all estimates of a session are computed again."""
MAX_PROBABILITY = 0.98
"""No node is more certain, so that a child is always less probable than its parent."""


class NodeAcceptance:
    """Estimates how likely a child of a committed token carries the target's token, by kind and order.

    prior: what was observed beyond this session or this tenant, which learns along; None if there is nothing.
    shared: whether many sessions add observations, which fade more slowly then. expected: `[kinds][orders]`, the
    probabilities before anything is observed, of one without a prior.
    """

    def __init__(
        self,
        prior: NodeAcceptance | None = None,
        *,
        shared: bool = False,
        expected: Sequence[Sequence[float]] = EXPECTED,
    ) -> None:
        self._levels: tuple[NodeAcceptance, ...] = (self, *(prior._levels if prior is not None else ()))
        """This one and those that learn along."""
        self._expected = [probability for kind in expected for probability in kind]
        self._estimates = _unknown()
        """Estimates in use, by cell: kind * orders + order; None for one to be computed again. What other sessions
        teach comes in with the next refresh."""
        self._observed = 0
        self._slow = shared or prior is None
        """Whether an observation changes so little that estimates stay until the next refresh."""
        self._decay = 1.0 - 1.0 / (_SHARED_MEMORY if self._slow else _MEMORY)
        self._tried = [0.0] * len(self._expected)
        self._accepted = [0.0] * len(self._expected)

    def probability(self, depth: int, order: int) -> float:
        """Return the probability of one child. depth: 1 after the last committed token. order: 0 came first."""
        return self.estimate(_CLASS[min(depth, len(_CLASS) - 1)], order)

    def estimate(self, kind: int, order: int) -> float:
        """Return the probability of one child of this kind, 0 to KINDS - 1."""
        return self._estimate(kind * _ORDERS + min(order, _ORDERS - 1))

    def observe(self, depth: int, order: int, accepted: bool) -> None:
        """Learn whether a child of a committed token carried the target's token."""
        cell = _CLASS[min(depth, len(_CLASS) - 1)] * _ORDERS + min(order, _ORDERS - 1)
        self._observe([(cell, accepted)])

    def learn(self, tree: TokenTree, tokens: Sequence[int], kinds: Mapping[int, int] | None = None) -> None:
        """Observe every child of the path that the target's next tokens take, before the tree advances.

        kinds: of the nodes by id; without them, a node's kind is its depth.
        """
        parent = ROOT
        observed: list[tuple[int, bool]] = []
        for depth, token in enumerate(tokens, start=1):
            children = tree.children(parent)
            kind = _CLASS[min(depth, len(_CLASS) - 1)]
            # Later siblings share one estimate; if each of them counted, worthless ones would swamp the observations.
            for order, (proposed, node) in enumerate(islice(children.items(), _ORDERS)):
                cell = (kind if kinds is None else kinds[node]) * _ORDERS + order
                observed.append((cell, proposed == token))
            if token not in children:
                break
            parent = children[token]
        self._observe(observed)

    def estimates(self, tree: TokenTree, kinds: Mapping[int, int] | None = None) -> dict[int, float]:
        """Return by id the probability of every node that it is committed if its parent is. kinds: as in `learn`."""
        found: dict[int, float] = {}
        siblings: dict[int, int] = {}
        first, deepest, last = tree.position - 1, len(_CLASS) - 1, _ORDERS - 1
        for node in tree:
            order = siblings.get(node.parent, 0)
            siblings[node.parent] = order + 1
            kind = _CLASS[min(node.position - first, deepest)] if kinds is None else kinds[node.id]
            cell = kind * _ORDERS + (order if order < last else last)
            found[node.id] = self._estimates[cell] or self._estimate(cell)
        return found

    def ranked(self, tree: TokenTree) -> list[tuple[float, int]]:
        """Return (probability that it is committed, node id) of every node, the most probable first.

        A parent always comes before its children.
        """
        return ranked_by(tree, self.estimates(tree))

    def _observe(self, observed: Sequence[tuple[int, bool]]) -> None:
        """Learn, for each cell, whether a child of a committed token carried the target's token."""
        count = len(observed)
        for level in self._levels:
            decay, tried, right = level._decay, level._tried, level._accepted
            for cell, accepted in observed:
                tried[cell] = decay * tried[cell] + 1.0
                right[cell] = decay * right[cell] + accepted
                if not level._slow:
                    level._estimates[cell] = None
            level._observed += count
            if level._observed % _REFRESH < count:
                level._estimates = _unknown()

    def _estimate(self, cell: int) -> float:
        known = self._estimates[cell]
        if known is None:
            above = self._levels[1] if len(self._levels) > 1 else None
            prior = (above._estimates[cell] or above._estimate(cell)) if above is not None else self._expected[cell]
            weight = self._tried[cell] + _PRIOR_WEIGHT
            known = min(MAX_PROBABILITY, (self._accepted[cell] + _PRIOR_WEIGHT * prior) / weight)
            self._estimates[cell] = known
        return known


def ranked_by(tree: TokenTree, estimates: Mapping[int, float]) -> list[tuple[float, int]]:
    """Return (probability that it is committed, node id) of every node, the most probable first.

    estimates: by id, of each node if its parent is committed. A parent always comes before its children.
    """
    if len(tree) == 0:
        return []
    probabilities = {ROOT: 1.0}
    for node in tree:
        probabilities[node.id] = probabilities[node.parent] * estimates[node.id]
    del probabilities[ROOT]
    return sorted(zip(probabilities.values(), probabilities, strict=True), key=itemgetter(0), reverse=True)


def _unknown() -> list[float | None]:
    return [None] * (KINDS * _ORDERS)
