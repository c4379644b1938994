"""Define a source of nodes on the verifier: what a step asks of it, what it proposes, and what it may learn from.

A source proposes a token tree for a session and one step. The engine merges the trees of all sources with the device's
nodes, evaluates what is worth its rows, and drops the verifier's own nodes after the step (overlay.py). So a source can
make steps faster or slower, and never change a token.

No source asks a session's grammar. Verification follows it along the target's own tokens alone, and what a path costs
counts against limits of its lexer that all sessions of the grammar share: paths that the target never takes could end
sessions that go on without them. What a grammar forbids is proposed in vain, and its acceptance soon shows that.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cloud_verifier.engine.nodes import ProposedTree, tenant_acceptance
from cloud_verifier.engine.session import EngineSession
from cloud_verifier.engine.stats import MovingAverage
from outrider.core.acceptance.node_acceptance import KINDS, SURER, NodeAcceptance
from outrider.core.proposals import Proposal
from outrider.core.tree import ROOT

if TYPE_CHECKING:
    import torch

MARGINS = (0.25, 0.75, 1.5, 2.5, 4.0, 6.5)
"""Upper edges of the margins of each kind of node, in nats; the last kind is open."""
USUAL_TOKENS = 16
"""Tokens of a session that a source reads in passing: those committed since it last proposed."""
CHILDREN = 3
"""The most children that `grow` proposes for one node."""
ASSUMED_GAIN = 1.0
"""Tokens that a source is assumed to add to a step of a session before any did."""


@dataclass(frozen=True)
class ProposalRequest:
    """Asks a source for a tree of one session, below the last of its known tokens (`session.tokens`).

    The step that comes computes that token, and all before it were computed.
    """

    session: EngineSession
    nodes: int
    """The most nodes that the session's step can use."""
    floor: float
    """Least path acceptance at which a node is worth proposing: the product of the acceptances along its path."""
    acceptance: NodeAcceptance
    """Estimated acceptance of this source's nodes in this session, by kind and order among siblings."""
    token_s: float = math.inf
    """Mean seconds in which the verifier commits one token, of whatever session; infinite before its first. Drafting
    pays if each token that it adds takes less."""


class ServerSource(ABC):
    """Proposes nodes for all sessions of a verifier, on the engine's thread.

    The engine drops a source whose methods raise, for all sessions, until the verifier starts again.
    """

    name: str
    """In statistics and metrics: a short word that no other source has."""
    wants_hidden = False
    """Whether `observe` is called. Such a source reads each step before the next one begins, so that a GPU has one
    cohort of sessions."""
    read_s = 0.0
    """Seconds of the last `propose` in which it read more than USUAL_TOKENS of a session, such as a prompt. They do not
    count as time of proposing. The source sets it in each `propose`, to 0 where it read no more; one that never reads
    so much leaves it."""

    def __init__(self) -> None:
        self.prior = tenant_acceptance(expected=SURER)
        """Salt -> acceptance of its nodes in all sessions of the tenant, where a new session starts."""
        self.seconds = MovingAverage()
        """Mean seconds of proposing for one session."""
        self.gains = {near: MovingAverage(0.02) for near in (False, True)}
        """Mean tokens that its nodes add to a step of a session, less their price: by whether nodes of the device are
        there or expected, since it may add little to them and much where there are none."""
        for gain in self.gains.values():
            gain.add(ASSUMED_GAIN)

    def pays(self, near: bool, token_s: float) -> bool:
        """Return whether proposing for a session takes less time than what it gains is worth.

        near: whether nodes of its device are there or expected. token_s: seconds in which a token is committed
        otherwise.
        """
        return self.gains[near].value * token_s >= self.seconds.value

    @abstractmethod
    def propose(self, requests: Sequence[ProposalRequest]) -> Mapping[str, ProposedTree]:
        """Return a tree by session id, which may be empty; none for sessions whose text it has not read yet.

        The step of all sessions waits for it: long texts are read in parts, or on another thread.
        """

    def observe(self, session: EngineSession, states: torch.Tensor) -> None:  # noqa: B027
        """Learn from the hidden states `[n, H]` after which the target gave the last n tokens of a session."""

    @abstractmethod
    def release(self, session_id: str) -> None:
        """Forget a session that has ended; harmless if it is not known."""


def level_pays(level_s: float, reached: float, before: float, token_s: float) -> bool:
    """Return whether a further level of trees is worth its time, if as many of its nodes are accepted as of the last.

    level_s: seconds that a level takes, which all sessions share. reached: expected number of sessions whose target
    reaches the last level. before: the one before it. token_s: seconds in which a token is committed otherwise.
    """
    return before > 0.0 and reached * reached / before * token_s >= level_s


def kind_of(margin: float) -> int:
    """Return the kind of a node by its margin in nats: how far the best is ahead, or another one behind it."""
    kind = 0
    while kind < KINDS - 1 and abs(margin) > MARGINS[kind]:
        kind += 1
    return kind


def grow(request: ProposalRequest, children: Callable[[Sequence[int]], Sequence[Proposal]]) -> ProposedTree:
    """Grow a tree best-first, by the path acceptance of its nodes (EAGLE-2, arXiv 2406.16858). Children that end
    the sequence too early are left out.

    children: path of tokens below the session's last one -> proposals for the next, the best one first. It is called
    for nodes that are in the tree alone, the most probable first.
    """
    session, acceptance = request.session, request.acceptance
    tree = ProposedTree(session.protocol.position)
    frontier: list[tuple[float, int, int, int, tuple[int, ...]]] = []
    """(-path acceptance, order of arrival, parent, kind, path) of nodes that may come next."""

    def consider(parent: int, path: tuple[int, ...], probability: float) -> None:
        if len(path) + 1 >= session.left:
            return  # the step's own token is the last one
        early = early_ends(session, session.protocol.position + len(path))
        allowed = [one for one in children(path) if one.token not in early]
        for order, proposal in enumerate(allowed[:CHILDREN]):
            kind = kind_of(proposal.margin)
            below = probability * acceptance.estimate(kind, order)
            if below >= request.floor or not path:  # what is never proposed is never measured
                heapq.heappush(frontier, (-below, len(tree) + order, parent, kind, (*path, proposal.token)))

    consider(ROOT, (), 1.0)
    while frontier and len(tree) < request.nodes:
        below, _, parent, kind, path = heapq.heappop(frontier)
        node = tree.propose(parent, path[-1], kind)
        if len(tree) < request.nodes and not session.protocol.ends(path[-1], tree[node].position):
            consider(node, path, -below)
    return tree


def early_ends(session: EngineSession, position: int) -> NDArray[np.int64]:
    """Return the ids that would end the session before its least length at a position."""
    constraint = session.sampler.constraint
    return constraint.early_ends(position) if constraint is not None else np.empty(0, np.int64)


def without_early_ends(logits: NDArray[np.float32], session: EngineSession, position: int) -> NDArray[np.float32]:
    """Return logits `[V]` with -inf for ids that would end the session before its least length at a position."""
    ends = early_ends(session, position)
    return np.where(np.isin(np.arange(len(logits)), ends), np.float32(-np.inf), logits) if len(ends) else logits
