"""Estimate how likely the next verification step is to commit a pending node, by the verifier's own statistics.

A node is described by its depth below the last committed token and its order among its siblings: nothing that a device
says of its nodes counts. The probability of a node is the product of those along its path, as in best-first growth of a
draft tree (EAGLE-2, arXiv 2406.16858). Every child of a committed token is an observation, whether or not it was
evaluated: the target's token is known, so a session whose nodes are not worth evaluating goes on being measured.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice

from outrider.core.tree import ROOT, TokenTree

_DEPTHS = (1, 2, 3, 4, 6, 9)
"""Greatest depth of each class; the last class is open."""
_CLASS = [bisect_left(_DEPTHS, depth) for depth in range(_DEPTHS[-1] + 2)]
"""The class of each depth; greater depths are in the last one."""
_PRIOR = (0.6, 0.15, 0.07, 0.03)
"""Probability of the first sibling, the second, and so on, before anything is observed."""
_PRIOR_WEIGHT = 8.0
"""Observations that the prior counts as."""
_MEMORY = 40.0
"""Observations of one class over which those of a session fade by a factor of e: acceptance changes with the text."""
_SHARED_MEMORY = 1000.0
"""The same for observations of many sessions."""
_REFRESH = 32
"""Observations after which all estimates of a session are computed again."""
_MAX_PROBABILITY = 0.98
"""No node is more certain, so that a child is always less probable than its parent."""


class NodeAcceptance:
    """Estimates how likely a child of a committed token carries the target's token, by depth and order.

    prior: what was observed beyond this session or this tenant, which learns along; None if there is nothing.
    shared: whether many sessions add observations, which fade more slowly then.
    """

    def __init__(self, prior: NodeAcceptance | None = None, *, shared: bool = False) -> None:
        self._prior = prior
        self._estimates = _unknown()
        """Estimates in use; None after an observation. What other sessions teach comes in with the next refresh."""
        self._observed = 0
        self._decay = 1.0 - 1.0 / (_SHARED_MEMORY if shared or prior is None else _MEMORY)
        self._tried = [[0.0] * len(_PRIOR) for _ in range(len(_DEPTHS) + 1)]
        self._accepted = [[0.0] * len(_PRIOR) for _ in range(len(_DEPTHS) + 1)]

    def probability(self, depth: int, order: int) -> float:
        """Return the probability of one child. depth: 1 after the last committed token. order: 0 came first."""
        return self._estimate(_CLASS[min(depth, len(_CLASS) - 1)], min(order, len(_PRIOR) - 1))

    def observe(self, depth: int, order: int, accepted: bool) -> None:
        """Learn whether a child of a committed token carried the target's token."""
        row, column = _CLASS[min(depth, len(_CLASS) - 1)], min(order, len(_PRIOR) - 1)
        self._observed += 1
        if self._observed % _REFRESH == 0:
            self._estimates = _unknown()
        self._estimates[row][column] = None
        self._tried[row][column] = self._decay * self._tried[row][column] + 1.0
        self._accepted[row][column] = self._decay * self._accepted[row][column] + accepted
        if self._prior is not None:
            self._prior.observe(depth, order, accepted)

    def learn(self, tree: TokenTree, tokens: Sequence[int]) -> None:
        """Observe every child of the path that the target's next tokens take, before the tree advances."""
        parent = ROOT
        for depth, token in enumerate(tokens, start=1):
            children = tree.children(parent)
            # Later siblings share one estimate; if each of them counted, worthless ones would swamp the observations.
            for order, proposed in enumerate(islice(children, len(_PRIOR))):
                self.observe(depth, order, proposed == token)
            if token not in children:
                return
            parent = children[token]

    def ranked(self, tree: TokenTree) -> list[tuple[float, int]]:
        """Return (probability that it is committed, node id) of every node, the most probable first.

        A parent always comes before its children.
        """
        if len(tree) == 0:
            return []
        estimates = self._estimates
        probabilities = {ROOT: 1.0}
        siblings: dict[int, int] = {}
        first = tree.position - 1
        deepest, last = len(_CLASS) - 1, len(_PRIOR) - 1
        for node in tree:
            order = siblings.get(node.parent, 0)
            siblings[node.parent] = order + 1
            row, column = _CLASS[min(node.position - first, deepest)], min(order, last)
            estimate = estimates[row][column]
            if estimate is None:
                estimate = estimates[row][column] = self._estimate(row, column)
            probabilities[node.id] = probabilities[node.parent] * estimate
        del probabilities[ROOT]
        return sorted(((probability, node) for node, probability in probabilities.items()), key=lambda pair: -pair[0])

    def _estimate(self, row: int, column: int) -> float:
        prior = _PRIOR[column] if self._prior is None else self._prior._estimate(row, column)
        tried, accepted = self._tried[row][column], self._accepted[row][column]
        return min(_MAX_PROBABILITY, (accepted + _PRIOR_WEIGHT * prior) / (tried + _PRIOR_WEIGHT))


def _unknown() -> list[list[float | None]]:
    return [[None] * len(_PRIOR) for _ in range(len(_DEPTHS) + 1)]
