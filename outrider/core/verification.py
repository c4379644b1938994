"""Verify a token tree by an acceptance rule.

The rule `coupled` accepts a child iff it equals the target's own token, which is lossless for any tree. The rule
`typical` also accepts other children that the target finds likely, which is lossy: what is drafted changes the output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.core.sampling import TypicalAcceptance
from outrider.core.tree import ROOT, TokenTree


@dataclass(slots=True)
class TreeBatch:
    """Lists one session's rows of a verification step: the last committed token (row 0) and some nodes.

    Row i + 1 is the node `ids[i]`; `parents[i]` is the row of its parent, smaller than i + 1. Each node comes with all
    its ancestors.
    """

    ids: tuple[int, ...]
    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    depths: tuple[int, ...]
    """1 for a child of row 0."""
    position: int
    """Generated tokens before the step: row 0 predicts the token at this position."""

    @property
    def children(self) -> list[list[int]]:
        """Return the tokens of each row's children, `[1 + nodes]`."""
        below: list[list[int]] = [[] for _ in range(len(self.ids) + 1)]
        for parent, token in zip(self.parents, self.tokens, strict=True):
            below[parent].append(token)
        return below


def tree_batch_of(tree: TokenTree, wanted: Collection[int]) -> TreeBatch:
    """Return the batch of the root and the wanted nodes, a set with the ancestors of each (docs/protocol.md, 13)."""
    rows, above = {ROOT: 0}, tree.position - 1
    columns: list[tuple[int, int, int, int]] = []
    for node in tree:
        if node.id in wanted:
            columns.append((node.id, rows[node.parent], node.token, node.position - above))
            rows[node.id] = len(columns)
    ids, parents, tokens, depths = zip(*columns, strict=True) if columns else ((), (), (), ())
    return TreeBatch(ids, parents, tokens, depths, tree.position)


def chain_of(tokens: Sequence[int], position: int) -> TreeBatch:
    """Return the batch of nodes each of which is the only child of the one before it."""
    rows = range(1, len(tokens) + 1)
    return TreeBatch(tuple(rows), tuple(range(len(tokens))), tuple(tokens), tuple(rows), position)


@dataclass(slots=True)
class Verified:
    """Holds the tokens that a step commits, and the rows of the accepted nodes."""

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    """Rows of the accepted nodes: one fewer than the tokens, or as many if the sequence ended inside the path."""


def typical_child(
    ids: NDArray[np.int64], log_p: NDArray[np.float64], children: Collection[int], rule: TypicalAcceptance
) -> int | None:
    """Return the likeliest child that typical acceptance takes (Medusa, arXiv 2401.10774), of equal ones the lowest id.

    ids, log_p: `[n]`, ascending, all tokens of positive probability under the target after processors, with the natural
    logarithm of that probability up to a constant. Returns None if no child has p > min(epsilon, delta * exp(-H)).
    """
    log_p = log_p - log_p.max()
    log_p -= np.log(np.exp(log_p).sum())
    p = np.exp(log_p)
    left = p > 0.0
    entropy = -float((p[left] * log_p[left]).sum())
    threshold = min(rule.epsilon, rule.delta * math.exp(-entropy))
    drafted = np.flatnonzero(np.isin(ids, np.fromiter(children, np.int64, len(children))))
    if not len(drafted):
        return None
    best = drafted[p[drafted].argmax()]
    return int(ids[best]) if p[best] > threshold else None


class Walk:
    """Follows the target's tokens down a batch: from row 0 on to the node that carries the target's token there, and so
    on until no node does.

    tokens: accepted so far. row: whose token is wanted next; None when the path has ended. position: of that token.
    """

    def __init__(self, batch: TreeBatch, ends: Callable[[int, int], bool]) -> None:
        """ends(token, position): whether the sequence ends with this token there, even inside an accepted path."""
        self.batch = batch
        self.position = batch.position
        self.tokens: list[int] = []
        self.row: int | None = 0
        self._rows: list[int] = []
        self._ends = ends
        self._nodes = {pair: row for row, pair in enumerate(zip(batch.parents, batch.tokens, strict=True), start=1)}

    @property
    def verified(self) -> Verified:
        return Verified(tuple(self.tokens), tuple(self._rows))

    def take(self, token: int) -> None:
        """Go on with the target's token after `row`, or with the child that a lossy rule accepts there."""
        ended = self._ends(token, self.position)
        self.tokens.append(token)
        self.position += 1
        child = self._nodes.get((self.row, token)) if self.row is not None else None
        if child is not None:
            self._rows.append(child)
        self.row = None if ended else child
