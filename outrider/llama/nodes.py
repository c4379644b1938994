"""The draft nodes of a tree context by handle, and what may be asked of them; knows nothing of llama.cpp.

Handles are given in ascending order, so a dict of nodes has parents before their children. The last committed token
is in it too, under the handle `TIP`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider.core.errors import BadRequest

TIP = 0
"""The handle of the last committed token."""


@dataclass(slots=True)
class Node:
    parent: int
    """Its parent's handle; TIP's own is TIP."""
    position: int
    """Tokens before it, committed ones and ancestors."""
    sequence: int
    """The llama.cpp sequence that its cell was decoded in."""
    token: int
    continued: bool = False
    """Whether a child has taken over the sequence; the next one needs a fork."""


def sequences(nodes: Mapping[int, Node]) -> set[int]:
    """The sequence ids in use."""
    return {node.sequence for node in nodes.values()}


def rerooted(nodes: Mapping[int, Node], tip: int) -> dict[int, Node]:
    """The nodes with `tip` as the new TIP, and of the others those that descend from it; its children become TIP's."""
    kept = {TIP: nodes[tip]}
    for handle, node in nodes.items():
        if handle in (TIP, tip):
            continue
        if node.parent == tip:
            node.parent = TIP
            kept[handle] = node
        elif node.parent != TIP and node.parent in kept:
            kept[handle] = node
    return kept


def forks_needed(nodes: Mapping[int, Node], parents: Sequence[int]) -> int:
    """New sequence ids that children of these parents need. Raises BadRequest for a parent that is no node."""
    heirs = set()
    for parent in parents:
        if parent not in nodes:
            known = "a handle of a node in the tree" if nodes else "preceded by reset(): nothing is committed"
            raise BadRequest.bound("parents", parent, known)
        if not nodes[parent].continued:
            heirs.add(parent)
    return len(parents) - len(heirs)


def check_path(nodes: Mapping[int, Node], path: Sequence[int]) -> None:
    """Raises BadRequest unless `path` is a chain of handles from a child of TIP down."""
    above = TIP
    for handle in path:
        if handle == TIP or handle not in nodes or nodes[handle].parent != above:
            raise BadRequest.bound("path", handle, "a child of the tip (0)" if above == TIP else f"a child of {above}")
        above = handle
