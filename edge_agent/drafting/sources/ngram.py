"""Propose what followed in the text when its last tokens stood there before.

This needs no model and microseconds a node: a tree grows as far as the text repeats itself, as code and quotations do
(LLMA, arXiv 2304.04487). The prompt holds the earlier turns of a conversation. Where a grammar leaves no
choice, as in the names of a JSON object, the source proposes what must follow.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge_agent.drafting.sources.base import DraftTask, NodeContext, Proposal
from outrider.core.constraint import Constraint
from outrider.core.ngram import NgramModel
from outrider.core.proposals import CERTAIN, propose_among

PROPOSALS = 3
"""Children that are proposed per node at most."""


class NgramSource:
    """A source that mixes counts of n-grams and proposes tokens by log q + g."""

    def __init__(self) -> None:
        self._model = NgramModel()
        self._task = DraftTask(prompt=())
        self._constraint: Constraint | None = None

    def begin(self, task: DraftTask) -> None:
        """Read the sequence. Raises BadRequest where it breaks its grammar."""
        self._task = task
        self._constraint = task.constraint()
        self._model.reset([*task.prompt, *task.received])

    def advance(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        if self._constraint is not None:
            self._constraint.commit(tokens)
        self._model.extend(tokens)

    def expand(self, nodes: Sequence[NodeContext]) -> list[list[Proposal]]:
        return [self._propose(node) for node in nodes]

    def _propose(self, node: NodeContext) -> list[Proposal]:
        """Return the token that must follow; where there is a choice, the likely ones that may follow."""
        constraint = self._constraint
        if constraint is not None and (forced := constraint.forced(node.path)):
            return [Proposal(forced[0], 0, CERTAIN)]
        ids, log_q = self._model.following(node.path)
        if constraint is not None:
            allowed = [constraint.allows(token, node.position, node.path) for token in ids.tolist()]
            ids, log_q = ids[allowed], log_q[allowed]
        return propose_among(ids, log_q, self._task.sampling, self._task.key, node.position, PROPOSALS)
