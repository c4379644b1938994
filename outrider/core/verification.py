"""The acceptance rule `coupled`: accept a child iff it equals the target's own token; lossless for any tree."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from outrider.core.tree import ROOT, TokenTree


@dataclass(frozen=True)
class TreeBatch:
    """What one step evaluates for one session: the last committed token (row 0) and an ancestor-closed set of nodes.

    Row i + 1 is the node `ids[i]`; `parents[i]` is the row of its parent, smaller than i + 1.
    """

    ids: tuple[int, ...]
    parents: tuple[int, ...]
    tokens: tuple[int, ...]
    depths: tuple[int, ...]
    """1 for a child of row 0."""
    position: int
    """Generated tokens before the step: what row 0 predicts stands there."""

    def children(self) -> dict[tuple[int, int], int]:
        """(row of the parent, token) -> row."""
        return {(parent, token): i + 1 for i, (parent, token) in enumerate(zip(self.parents, self.tokens, strict=True))}


def tree_batch_of(tree: TokenTree, wanted: Collection[int]) -> TreeBatch:
    """The root and the wanted nodes, each with all its ancestors."""
    rows = {ROOT: 0}
    ids: list[int] = []
    parents: list[int] = []
    tokens: list[int] = []
    depths: list[int] = []
    for node in tree:
        if node.id in wanted:
            rows[node.id] = len(ids) + 1
            ids.append(node.id)
            parents.append(rows[node.parent])
            tokens.append(node.token)
            depths.append(tree.depth(node.id))
    return TreeBatch(tuple(ids), tuple(parents), tuple(tokens), tuple(depths), tree.position)


@dataclass(frozen=True)
class Verified:
    """What a step commits."""

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    """Rows accepted on the way: one fewer than the tokens, or as many where the sequence ended."""


def verify(
    batch: TreeBatch, target_token: Callable[[int, Sequence[int]], int], ends: Callable[[int, int], bool]
) -> Verified:
    """Take the target's token at row 0, go on from the node that carries it, and so on; stop where no node does.

    target_token(row, path): the target's token after that row, `path` the tokens accepted so far in this step.
    ends(token, position): whether the sequence ends with this token at this position, even inside an accepted path.
    """
    children = batch.children()
    tokens: list[int] = []
    rows: list[int] = []
    row: int | None = 0
    while row is not None:
        token = target_token(row, tokens)
        tokens.append(token)
        row = children.get((row, token))
        if row is not None:
            rows.append(row)
        if ends(token, batch.position + len(tokens) - 1):
            break
    return Verified(tuple(tokens), tuple(rows))
