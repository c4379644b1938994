"""Keep computed prefixes for later sessions: a radix tree over KV slots with reference counts, one tree per salt.

A slot that the tree owns holds the keys and values of one token after one path of tokens, for as long as it is cached;
every session that begins with this path reads it there. A session holds a lease on its path. Slots without a lease are
available: `evict` returns them, longest unused first, leaves before their parents.

The salt is the tenant. Paths under different salts never meet, so the time in which a prompt is read tells a tenant
nothing about other tenants' prompts. (What is evicted depends on how much all tenants send, not on its content.)
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

_NO_SLOTS: NDArray[np.int32] = np.empty(0, dtype=np.int32)


@dataclass(eq=False)
class _Node:
    """An edge and the node that it leads to. The children of the top are the salts' roots, whose edges are empty."""

    key: str | int
    """Its key among its parent's children: the salt of a root, else the first token of its edge."""
    parent: _Node | None
    tokens: Tokens = field(default_factory=lambda: _NO_SLOTS)
    slots: Slots = field(default_factory=lambda: _NO_SLOTS)
    children: dict[str | int, _Node] = field(default_factory=dict)
    leases: int = 0
    """Number of leases on this node or below."""

    @property
    def above(self) -> _Node:
        """Return the parent of a node that is not the top."""
        if self.parent is None:
            raise InternalError("the top of the prefix cache has no parent")
        return self.parent


@dataclass(frozen=True, eq=False)
class PrefixLease:
    """A path that stays cached until the lease is released. slots: `[n]`, of the path's tokens."""

    node: _Node
    slots: Slots


class PrefixCache:
    """Keeps a tree of cached tokens for each salt. The caller owns slots that it has not published, or has got back."""

    def __init__(self) -> None:
        self.leased = 0
        """Number of slots on leased paths; each counts once."""
        self.cached = 0
        """Number of slots without a lease: as good as free."""
        self._top = _Node("", None)
        self._idle: OrderedDict[_Node, None] = OrderedDict()
        """Nodes without a lease, longest unused first. A lease is released leaf first, so no node comes before one
        below it: the first is always a leaf."""
        self.no_lease = PrefixLease(self._top, _NO_SLOTS)
        """The lease of a session that has no cached prefix."""

    def acquire(self, salt: str, tokens: Sequence[int] | Tokens) -> PrefixLease:
        """Return a lease on the longest cached prefix of the tokens."""
        node, slots = self._descend(salt, np.asarray(tokens, dtype=np.int32))
        self._hold(node)
        return PrefixLease(node, slots)

    def release(self, lease: PrefixLease) -> None:
        """End a lease; each must be released once."""
        node = lease.node
        while node.parent is not None:
            node.leases -= 1
            if node.leases == 0:
                self._idle[node] = None
                self.leased -= len(node.slots)
                self.cached += len(node.slots)
            node = node.parent

    def publish(
        self, lease: PrefixLease, salt: str, tokens: Sequence[int] | Tokens, slots: Slots
    ) -> tuple[PrefixLease, Slots]:
        """Pass the slots of the tokens to the cache; the lease, acquired under this salt, is on a prefix of the tokens.

        Returns a lease on all tokens, in place of the given one, and those of the slots that are not needed because the
        cache has others with the same tokens: the new lease has those instead.
        """
        path = np.asarray(tokens, dtype=np.int32)
        node, known = self._descend(salt, path)
        if len(known) < len(path):
            node = self._grow(salt, node, path[len(known) :], slots[len(known) :])
        self._hold(node)
        self.release(lease)
        return PrefixLease(node, np.concatenate([known, slots[len(known) :]])), slots[
            len(lease.slots) : len(known)
        ].copy()

    def held_only_by(self, lease: PrefixLease) -> int:
        """Return the number of slots that only this lease holds."""
        count, node = 0, lease.node
        while node.parent is not None and node.leases == 1:
            count += len(node.slots)
            node = node.parent
        return count

    def evict(self, count: int) -> Slots:
        """Forget `count` tokens (fewer if fewer are without a lease) and return their slots."""
        freed = [_NO_SLOTS]
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
        """Return the node at which the longest cached prefix ends, after a split if need be, and the prefix's slots."""
        node, child = self._top, self._top.children.get(salt)
        slots, depth = [_NO_SLOTS], 0
        while child is not None:
            common = _common(child.tokens, tokens[depth:])
            node = child if common == len(child.tokens) else self._split(child, common)
            slots.append(node.slots)
            depth += common
            child = node.children.get(int(tokens[depth])) if node is child and depth < len(tokens) else None
        return node, np.concatenate(slots)

    def _split(self, lower: _Node, length: int) -> _Node:
        """Split a node's edge after `length` tokens and return the new upper node.

        If it has no lease the caller must hold it: it has no place in the order of `_idle`.
        """
        above = lower.above
        upper = _Node(lower.key, above, lower.tokens[:length].copy(), lower.slots[:length].copy())
        upper.leases = lower.leases
        above.children[lower.key] = upper
        lower.parent, lower.key = upper, int(lower.tokens[length])
        lower.tokens, lower.slots = lower.tokens[length:].copy(), lower.slots[length:].copy()
        upper.children[lower.key] = lower
        return upper

    def _grow(self, salt: str, node: _Node, tokens: Tokens, slots: Slots) -> _Node:
        """Return a new leaf below the node, without a lease."""
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
                self._idle.pop(node, None)  # a new node is not in it
                self.leased += len(node.slots)
                self.cached -= len(node.slots)
            node = node.parent


def _common(one: Tokens, other: Tokens) -> int:
    """Return the length of the common prefix."""
    length = min(len(one), len(other))
    differ = np.flatnonzero(one[:length] != other[:length])
    return int(differ[0]) if len(differ) else length
