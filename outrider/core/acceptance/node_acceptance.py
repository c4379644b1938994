"""What a pending node is worth to the verifier: the chance that the next step commits it, by its own statistics.

A node is known by its depth below the last committed token and by its order among its siblings, nothing else: what a
device says of its nodes does not count. Its survival is the product of accept probabilities along its path, as in best-
first growth of a draft tree (EAGLE-2, arXiv 2406.16858). Every child of a committed token is an observation, whether it
was evaluated or not: the target's token is known, so a session whose nodes are not worth a row goes on being judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from outrider.core.tree import ROOT, TokenTree

_DEPTHS = (1, 2, 3, 4, 6, 9)
"""Greatest depth of each class; the last class is open."""
_CLASS = [
    next((i for i, last in enumerate(_DEPTHS) if depth <= last), len(_DEPTHS)) for depth in range(_DEPTHS[-1] + 2)
]
_PRIOR = (0.6, 0.15, 0.07, 0.03)
"""Accept probability of the first sibling, the second, and so on, before anything is known."""
_PRIOR_WORTH = 8.0
"""Observations that what is known of all sessions counts for in one session's estimate."""
_MEMORY = 40.0
"""Observations of one class over which a session's fade by a factor of e: a draft's luck changes with the text."""
_MEMORY_OF_MANY = 1000.0
"""And those of many sessions."""
_REFRESH = 32
"""Observations after which all estimates of a session are made anew."""
_CERTAIN = 0.98
"""No guess is trusted further, so that a child is always worth less than its parent."""


class NodeAcceptance:
    """That the target's token, after a parent that was committed, is its child of this depth and order.

    prior: what is known beyond this session, or beyond this tenant; it learns along. None where nothing is beyond.
    shared: by many sessions, whose observations it keeps longer.
    """

    def __init__(self, prior: NodeAcceptance | None = None, *, shared: bool = False) -> None:
        self._prior = prior
        self._known = _unknown()
        """Estimates in use; None after an observation. What other sessions teach comes in a while later."""
        self._observed = 0
        self._keeps = 1.0 - 1.0 / (_MEMORY_OF_MANY if shared or prior is None else _MEMORY)
        self._tried = [[0.0] * len(_PRIOR) for _ in range(len(_DEPTHS) + 1)]
        self._accepted = [[0.0] * len(_PRIOR) for _ in range(len(_DEPTHS) + 1)]

    def probability(self, depth: int, order: int) -> float:
        """depth: 1 for a child of the last committed token. order: 0 for the sibling that came first."""
        return self._estimate(_CLASS[min(depth, len(_CLASS) - 1)], min(order, len(_PRIOR) - 1))

    def observe(self, depth: int, order: int, accepted: bool) -> None:
        """The target's token is known: whether it is this child's."""
        row, column = _CLASS[min(depth, len(_CLASS) - 1)], min(order, len(_PRIOR) - 1)
        self._observed += 1
        if self._observed % _REFRESH == 0:
            self._known = _unknown()
        self._known[row][column] = None
        self._tried[row][column] = self._keeps * self._tried[row][column] + 1.0
        self._accepted[row][column] = self._keeps * self._accepted[row][column] + accepted
        if self._prior is not None:
            self._prior.observe(depth, order, accepted)

    def learn(self, tree: TokenTree, tokens: Sequence[int]) -> None:
        """The target's next tokens: judge every child of the path that they take. Before the tree advances."""
        parent = ROOT
        for depth, token in enumerate(tokens, start=1):
            children = tree.children(parent)
            # Later siblings share one estimate; to let each of them count would let rubbish drown what others taught.
            for order, guess in enumerate(islice(children, len(_PRIOR))):
                self.observe(depth, order, guess == token)
            if token not in children:
                return
            parent = children[token]

    def survivals(self, tree: TokenTree) -> list[tuple[float, int]]:
        """(survival, node id) of every node, the best first; a parent always before its children."""
        if len(tree) == 0:
            return []
        known = self._known
        survival = {ROOT: 1.0}
        born: dict[int, int] = {}
        first = tree.position - 1
        deepest, last = len(_CLASS) - 1, len(_PRIOR) - 1
        for node in tree:
            order = born.get(node.parent, 0)
            born[node.parent] = order + 1
            row, column = _CLASS[min(node.position - first, deepest)], min(order, last)
            chance = known[row][column]
            if chance is None:
                chance = known[row][column] = self._estimate(row, column)
            survival[node.id] = survival[node.parent] * chance
        del survival[ROOT]
        return sorted(((chance, node) for node, chance in survival.items()), key=lambda pair: -pair[0])

    def _estimate(self, row: int, column: int) -> float:
        prior = _PRIOR[column] if self._prior is None else self._prior._estimate(row, column)
        tried, accepted = self._tried[row][column], self._accepted[row][column]
        return min(_CERTAIN, (accepted + _PRIOR_WORTH * prior) / (tried + _PRIOR_WORTH))


def _unknown() -> list[list[float | None]]:
    return [[None] * len(_PRIOR) for _ in range(len(_DEPTHS) + 1)]
