"""Hold the token tree that device and verifier share: append-only, rooted at the last committed token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

ROOT = 0
"""The id of the root: the committed sequence itself, not a node."""


@dataclass(slots=True)
class Node:
    """A draft token that stands at `position`, after its ancestors."""

    id: int
    parent: int
    token: int
    position: int
    children: dict[int, int] = field(default_factory=dict)
    """token -> id"""


class TokenTree:
    """Nodes by id, in the order in which they were added: every node after its parent.

    `position` is the number of generated tokens before the root's children, so a node's depth is
    `node.position - tree.position + 1`.
    """

    def __init__(self, position: int = 0) -> None:
        self.position = position
        self._nodes: dict[int, Node] = {}
        self._root_children: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def __iter__(self) -> Iterator[Node]:
        """Iterate over the nodes in insertion order, ancestors first."""
        return iter(self._nodes.values())

    def __contains__(self, node_id: int) -> bool:
        return node_id in self._nodes

    def __getitem__(self, node_id: int) -> Node:
        return self._nodes[node_id]

    def get(self, node_id: int) -> Node | None:
        return self._nodes.get(node_id)

    def children(self, parent: int) -> dict[int, int]:
        """Return token -> id of the children of a node or of ROOT."""
        return self._root_children if parent == ROOT else self._nodes[parent].children

    def child(self, parent: int, token: int) -> int | None:
        return self.children(parent).get(token)

    def position_under(self, parent: int) -> int:
        """Return the position of a child of `parent`."""
        return self.position if parent == ROOT else self._nodes[parent].position + 1

    def depth(self, node_id: int) -> int:
        """Return the depth of a node: 1 for a child of the root, 0 for ROOT."""
        return 0 if node_id == ROOT else self._nodes[node_id].position - self.position + 1

    def add(self, node_id: int, parent: int, token: int) -> Node:
        """Add a node. The caller ensures that the id is new, the parent known and the token no sibling's."""
        above = None if parent == ROOT else self._nodes[parent]
        position, siblings = (
            (self.position, self._root_children) if above is None else (above.position + 1, above.children)
        )
        node = self._nodes[node_id] = Node(node_id, parent, token, position)
        siblings[token] = node_id
        return node

    def path(self, node_id: int) -> list[int]:
        """Return the tokens from below the root down to the node, itself included; [] for ROOT."""
        tokens = []
        while node_id != ROOT:
            node = self._nodes[node_id]
            tokens.append(node.token)
            node_id = node.parent
        return tokens[::-1]

    def advance(self, tokens: Sequence[int]) -> list[int]:
        """Commit tokens: re-root at the node that the last one leads to, and drop all that does not descend from it.

        Returns the ids of the nodes that carried the first tokens, which are nodes no longer; where they are fewer than
        the tokens the tree is empty.
        """
        path: list[int] = []
        children = self._root_children
        for token in tokens:
            if (node_id := children.get(token)) is None:
                break
            path.append(node_id)
            children = self._nodes[node_id].children
        self.position += len(tokens)
        if len(path) < len(tokens) or not children:
            self.clear()
        elif path:
            kept = {path[-1]}
            nodes, self._nodes, self._root_children = self._nodes, {}, children
            for node in nodes.values():  # parents come before their children
                if node.parent in kept:
                    kept.add(node.id)
                    self._nodes[node.id] = node
            for node_id in children.values():
                self._nodes[node_id].parent = ROOT
        return path

    def remove(self, node_id: int) -> None:
        """Drop a node, which must have no children."""
        node = self._nodes.pop(node_id)
        del self.children(node.parent)[node.token]

    def clear(self) -> None:
        """Drop every node; the position stays."""
        self._nodes.clear()
        self._root_children = {}
