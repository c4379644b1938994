"""The draft model on llama.cpp as a source of proposals."""

from __future__ import annotations

from collections.abc import Sequence

from edge_agent.drafting.sources.base import DraftTask, NodeContext, Proposal
from outrider.core.counts import TokenCounts
from outrider.core.coupling import session_key
from outrider.core.proposals import propose
from outrider.core.tree import ROOT
from outrider.llama import TreeContext

PROPOSALS = 4
"""Children proposed per node; the grower offers fewer."""


class LlamaSource:
    """Evaluates nodes in a TreeContext, one decode for all spots of a call, and proposes by log q + g.

    shared_vocabulary: ids that draft and target share; those at or beyond it are never proposed.
    """

    def __init__(self, context: TreeContext, *, shared_vocabulary: int) -> None:
        self._context = context
        self._shared = min(shared_vocabulary, context.vocab_size)
        self._task = DraftTask(prompt=())
        self._key = 0
        self._counts = TokenCounts()
        self._handles: dict[int, int] = {}
        self._tip: list[Proposal] = []
        self._position = 0

    def begin(self, task: DraftTask) -> None:
        """Prefill. Raises ContextFull where the prompt is longer than the draft's context."""
        self._task = task
        self._key = 0 if task.sampling.greedy else session_key(task.sampling.seed, task.prompt)
        self._counts = TokenCounts((*task.prompt, *task.received) if task.sampling.penalised else ())
        self._handles = {}
        self._position = len(task.received)
        logits = self._context.reset([*task.prompt, *task.received])
        self._tip = self._propose(logits, ())

    def advance(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Commit what was evaluated of the path, and evaluate the rest of the tokens."""
        evaluated: list[int] = []
        for node in path:
            if node not in self._handles:
                break
            evaluated.append(self._handles[node])
        if self._task.sampling.penalised:
            self._counts.add(tokens)
        self._position += len(tokens)
        tail = list(tokens[len(evaluated) :])
        logits = self._context.commit(evaluated, tail)
        if logits is None:
            self._tip = []  # the new root's own proposals were made when it was expanded as a node
            self._handles = {node: handle for node, handle in self._handles.items() if handle not in evaluated}
        else:
            self._handles = {}
            self._tip = self._propose(logits, ())

    def expand(self, spots: Sequence[NodeContext]) -> list[list[Proposal]]:
        """One decode for all spots; the root, whose logits are there already, needs none.

        Raises TreeFull where the context has no room for them; nothing was changed then.
        """
        nodes = [spot for spot in spots if spot.id != ROOT]
        found: dict[int, list[Proposal]] = {ROOT: self._tip}
        if nodes:
            parents = [0 if spot.parent == ROOT else self._handles[spot.parent] for spot in nodes]
            handles, logits = self._context.decode(parents, [spot.token for spot in nodes])
            for spot, handle, row in zip(nodes, handles, logits, strict=True):
                self._handles[spot.id] = handle
                found[spot.id] = self._propose(row, spot.path)
        return [found[spot.id] for spot in spots]

    def knows(self, token: int) -> bool:
        """Whether the draft can evaluate this token."""
        return token < self._shared

    def _propose(self, logits: object, path: tuple[int, ...]) -> list[Proposal]:
        row = logits[: self._shared]  # type: ignore[index]
        return propose(row, self._task.sampling, self._key, self._position + len(path), self._counts, path, PROPOSALS)
