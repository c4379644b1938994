"""Brings what the drafter grew into the session, which may have moved on meanwhile.

The same rules as between device and verifier: a parent is the committed sequence at `base`, a token that has since been
committed, a live node, or dead; what hangs below a dead one is dropped.
"""

from __future__ import annotations

from edge_agent.drafting.drafter import DraftNode, DraftUpdate
from outrider.core.protocol.device import Delivery, DeviceSession
from outrider.core.tree import ROOT


class Intake:
    """Maps a drafter's node ids to the session's; one per session and drafter."""

    def __init__(self, session: DeviceSession, vocabulary_size: int) -> None:
        self._session = session
        self.vocabulary_size = vocabulary_size
        """Ids at or beyond it are no tokens of the target."""
        self._live: dict[int, int] = {}
        """drafter's id -> session's id"""
        self._passed: dict[int, int] = {}
        """drafter's id of a node that equals a committed token -> the position after it"""

    @property
    def known(self) -> int:
        """Nodes of the session's tree that the drafter grew, too."""
        return len(self._live)

    def add(self, growth: DraftUpdate) -> int:
        """Add the nodes that still make sense; returns how many were added."""
        self._passed = {node: after for node, after in self._passed.items() if after >= growth.base}
        return sum(self._add(node, growth.base) for node in growth.nodes)

    def moved(self, delivery: Delivery) -> None:
        """The session has delivered tokens: nodes have become tokens, and others are gone."""
        first = len(self._session.received) - len(delivery.tokens)
        after = {node: first + i + 1 for i, node in enumerate(delivery.path)}
        for ours, theirs in list(self._live.items()):
            if theirs in after:
                self._passed[ours] = after[theirs]
            if theirs not in self._session.tree:
                del self._live[ours]

    def _add(self, node: DraftNode, base: int) -> bool:
        parent = self._parent(node, base)
        if parent is None or node.token >= self.vocabulary_size:
            return False
        present = self._session.tree.child(parent, node.token)
        ours = present if present is not None else self._session.add(parent, node.token)
        if ours is None:
            return False
        self._live[node.id] = ours
        return present is None

    def _parent(self, node: DraftNode, base: int) -> int | None:
        """The session's id of the parent; None for a node that is dead or was committed since."""
        if node.parent in self._live:
            return self._live[node.parent]
        position = base if node.parent == ROOT else self._passed.get(node.parent)
        received = self._session.received
        if position is None:
            return None
        if position < len(received):
            if received[position] == node.token:
                self._passed[node.id] = position + 1
            return None
        return ROOT
