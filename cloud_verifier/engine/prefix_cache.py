"""Which slots hold which tokens: a radix tree over slots with reference counts, one tree per salt. No tensors here.

A slot that the tree owns holds the keys and values of one token after one path of tokens, for good; every session that
begins with this path reads it there. A session holds a lease on its path. What no lease covers is free for the asking:
`evict` gives it back, longest unused first, leaves before what they hang on.

The salt is the tenant. Paths under different salts never meet, so how fast a prompt is taken in tells nobody what
others have sent. (What is evicted when does depend on everybody, but on how much they send, not on what.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from outrider.core.errors import InternalError

Tokens = NDArray[np.int32]
Slots = NDArray[np.int32]
"""Slot numbers, `[n]`."""

_NOTHING: NDArray[np.int32] = np.empty(0, dtype=np.int32)


@dataclass(eq=False)
class _Node:
    """An edge and the node at its end. Below the top come the salts' roots, whose edges are empty."""

    key: str | int
    """Where it hangs below its parent: the salt of a root, else the first token of its edge."""
    parent: _Node | None
    tokens: Tokens = field(default_factory=lambda: _NOTHING)
    slots: Slots = field(default_factory=lambda: _NOTHING)
    children: dict[str | int, _Node] = field(default_factory=dict)
    leases: int = 0
    """On this node or below."""

    @property
    def above(self) -> _Node:
        """The parent of a node that is not the top."""
        if self.parent is None:
            raise InternalError("the top of the prefix cache was taken for a part of it")
        return self.parent


@dataclass(frozen=True, eq=False)
class Lease:
    """A path that stays where it is until its holder gives it back."""

    node: _Node
    slots: Slots
    """`[n]`: of the path's tokens."""

    def __len__(self) -> int:
        return len(self.slots)


class PrefixCache:
    """The trees. Whoever calls owns the slots that it has not yet given, and those that it is given back."""

    def __init__(self) -> None:
        self.leased = 0
        """Slots on paths that someone holds; each counts once."""
        self.cached = 0
        """Slots that nobody holds: as good as free."""
        self._top = _Node("", None)
        self._idle: OrderedDict[_Node, None] = OrderedDict()
        """Nodes without a lease, longest unused first. A lease ends leaf first, so no node comes before one below it:
        the first is always a leaf."""
        self.nothing = Lease(self._top, _NOTHING)
        """The lease of who holds no path."""

    def acquire(self, salt: str, tokens: Sequence[int] | Tokens) -> Lease:
        """A lease on the longest known prefix of the tokens."""
        node, slots = self._descend(salt, np.asarray(tokens, dtype=np.int32))
        self._hold(node)
        return Lease(node, slots)

    def release(self, lease: Lease) -> None:
        """Give a lease back, once."""
        node = lease.node
        while node.parent is not None:
            node.leases -= 1
            if node.leases == 0:
                self._idle[node] = None
                self.leased -= len(node.slots)
                self.cached += len(node.slots)
            node = node.parent

    def publish(self, lease: Lease, salt: str, tokens: Sequence[int] | Tokens, slots: Slots) -> tuple[Lease, Slots]:
        """Hand over the slots that hold the tokens, of which the lease, acquired under this salt, is a prefix.

        Returns a lease on all of them, in place of the one given, and the slots that are not needed because others
        hold the same tokens: the new lease's slots stand in for them.
        """
        path = np.asarray(tokens, dtype=np.int32)
        node, known = self._descend(salt, path)
        if len(known) < len(path):
            node = self._grow(salt, node, path[len(known) :], slots[len(known) :])
        self._hold(node)
        self.release(lease)
        return Lease(node, np.concatenate([known, slots[len(known) :]])), slots[len(lease) : len(known)].copy()

    def held_only_by(self, lease: Lease) -> int:
        """Slots that nobody would hold any more without this lease."""
        count, node = 0, lease.node
        while node.parent is not None and node.leases == 1:
            count += len(node.slots)
            node = node.parent
        return count

    def evict(self, count: int) -> Slots:
        """Forget `count` tokens (fewer where fewer are unleased) and return their slots."""
        freed = [_NOTHING]
        while count > 0 and self._idle:
            node = next(iter(self._idle))
            kept = max(0, len(node.slots) - count)
            freed.append(node.slots[kept:])
            count -= len(freed[-1])
            if kept:
                node.tokens, node.slots = node.tokens[:kept].copy(), node.slots[:kept].copy()
            else:
                del self._idle[node]
                del node.above.children[node.key]
        slots = np.concatenate(freed)
        self.cached -= len(slots)
        return slots

    def _descend(self, salt: str, tokens: Tokens) -> tuple[_Node, Slots]:
        """The node at which the longest known prefix ends, made by a split if need be, and the prefix's slots."""
        node, child = self._top, self._top.children.get(salt)
        slots, depth = [_NOTHING], 0
        while child is not None:
            common = _common(child.tokens, tokens[depth:])
            node = child if common == len(child.tokens) else self._split(child, common)
            slots.append(node.slots)
            depth += common
            child = node.children.get(int(tokens[depth])) if node is child and depth < len(tokens) else None
        return node, np.concatenate(slots)

    def _split(self, lower: _Node, length: int) -> _Node:
        """Part a node's edge after `length` tokens; the new upper node. An idle one's must be held before it is idle:
        it has no place in the order of `_idle`."""
        above = lower.above
        upper = _Node(lower.key, above, lower.tokens[:length].copy(), lower.slots[:length].copy())
        upper.leases = lower.leases
        above.children[lower.key] = upper
        lower.parent, lower.key = upper, int(lower.tokens[length])
        lower.tokens, lower.slots = lower.tokens[length:].copy(), lower.slots[length:].copy()
        upper.children[lower.key] = lower
        return upper

    def _grow(self, salt: str, node: _Node, tokens: Tokens, slots: Slots) -> _Node:
        """A new leaf below the node; not yet held."""
        if node is self._top:
            node.children[salt] = node = _Node(salt, node)
        leaf = _Node(int(tokens[0]), node, tokens.copy(), slots.copy())
        node.children[leaf.key] = leaf
        self.cached += len(slots)
        return leaf

    def _hold(self, node: _Node) -> None:
        while node.parent is not None:
            node.leases += 1
            if node.leases == 1:
                self._idle.pop(node, None)  # one that was just made is not in it
                self.leased += len(node.slots)
                self.cached -= len(node.slots)
            node = node.parent


def _common(one: Tokens, other: Tokens) -> int:
    """Length of the common prefix."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length
