"""Propose tokens with a draft model on llama.cpp."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from edge_agent.drafting.sources.base import DraftTask, NodeContext, Proposal
from outrider.core.constraint import Constraint, Row
from outrider.core.processors import TokenCounts
from outrider.core.proposals import CERTAIN, propose
from outrider.core.tree import ROOT
from outrider.llama import TreeContext

PROPOSALS = 4
"""Children that are proposed per node; the drafter adds fewer."""


class LlamaSource:
    """A source that evaluates all nodes of a call in one decode of a TreeContext, and proposes tokens by log q + g.

    The context knows the nodes by their own ids: ROOT is the tip.

    shared_vocabulary: number of ids that draft and target share; larger ids are never proposed. unlike: ids below that
    are not, either.
    """

    def __init__(self, context: TreeContext, *, shared_vocabulary: int, unlike: Sequence[int] = ()) -> None:
        self._context = context
        self._unlike = list(unlike)
        self._shared_vocabulary = shared_vocabulary
        self._task = DraftTask(prompt=())
        self._counts = TokenCounts()
        self._constraint: Constraint | None = None
        self._root_proposals: list[Proposal] = []
        self._position = 0

    def begin(self, task: DraftTask) -> None:
        """Read the sequence. Raises ContextFull where it is longer than the draft's context, BadRequest where it breaks
        its grammar."""
        self._task = task
        self._counts = TokenCounts(task.prompt, task.received) if task.sampling.penalised else TokenCounts()
        self._constraint = task.constraint()
        self._position = len(task.received)
        logits = self._context.reset([*task.prompt, *task.received])
        self._root_proposals = self._propose(logits, ())

    def advance(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Commit what was evaluated of the path, and evaluate the rest of the tokens."""
        evaluated = list(itertools.takewhile(self._context.holds, path))
        if self._task.sampling.penalised:
            self._counts.add(tokens)
        if self._constraint is not None:
            self._constraint.commit(tokens)
        self._position += len(tokens)
        logits = self._context.commit(evaluated, list(tokens[len(evaluated) :]))
        # Without logits, the new root's proposals were made when it was expanded as a node.
        self._root_proposals = [] if logits is None else self._propose(logits, ())

    def expand(self, nodes: Sequence[NodeContext]) -> list[list[Proposal]]:
        """Evaluate the nodes in one decode; the root, whose logits are known already, needs none.

        Raises TreeFull where the context has no room for them; then nothing was changed.
        """
        unevaluated = [node for node in nodes if node.id != ROOT]
        found: dict[int, list[Proposal]] = {ROOT: self._root_proposals}
        if unevaluated:
            parents, ids = [node.parent for node in unevaluated], [node.id for node in unevaluated]
            tokens, wanted = [node.token for node in unevaluated], [node.wanted for node in unevaluated]
            _, logits = self._context.decode(parents, tokens, ids, wanted)
            for node, row in zip((node for node in unevaluated if node.wanted), logits, strict=True):
                found[node.id] = self._propose(row, node.path)
        return [found.get(node.id, []) for node in nodes]

    def _propose(self, logits: Row, path: tuple[int, ...]) -> list[Proposal]:
        row, position = logits[: self._shared_vocabulary], self._position + len(path)
        if self._constraint is not None and self._constraint.binds(position):
            forced = self._constraint.forced(path)
            if forced:
                return [Proposal(forced[0], 0, CERTAIN)]
            row = self._constraint.masked(row, position, path)
        if self._unlike:
            row = row.copy()
            row[self._unlike] = -np.inf
        return propose(row, self._task.sampling, self._task.key, position, self._counts, path, PROPOSALS)
