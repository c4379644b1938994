"""Propose what followed in the text when its last tokens stood there before (arXiv 2304.04487).

This needs no model and almost no time: a chain grows as long as the text repeats itself, as code and quotations do.
Where a grammar leaves no choice, as in the names of a JSON object, it proposes what must follow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from edge_agent.drafting.sources.base import DraftTask, NodeContext, Proposal
from outrider.core.constraint import Constraint
from outrider.core.proposals import CERTAIN

_KEY = 2
"""Tokens that must match at least."""
_LONGEST = 12
"""Tokens that are compared at most: longer matches are no better."""
_LATEST = 8
"""Occurrences that are compared, the most recent ones first."""


class PromptLookup:
    """A source that proposes one child per node at most: the token after the node's longest, most recent match."""

    def __init__(self) -> None:
        self._text: list[int] = []
        self._constraint: Constraint | None = None
        self._after: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        """Each `_KEY` tokens of the text -> the positions after their occurrences."""

    def begin(self, task: DraftTask) -> None:
        self._text = []
        self._after = defaultdict(list)
        self._constraint = task.constraint()
        self._extend((*task.prompt, *task.received))

    def advance(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        if self._constraint is not None:
            self._constraint.commit(tokens)
        self._extend(tokens)

    def expand(self, nodes: Sequence[NodeContext]) -> list[list[Proposal]]:
        if self._constraint is None:
            return [self._look_up(node.path) for node in nodes]
        return [self._allowed(self._constraint, node) for node in nodes]

    def knows(self, token: int) -> bool:
        return True

    def _extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text and index them."""
        begin = max(_KEY, len(self._text))
        self._text.extend(tokens)
        for i in range(begin, len(self._text)):
            self._after[tuple(self._text[i - _KEY : i])].append(i)

    def _allowed(self, constraint: Constraint, node: NodeContext) -> list[Proposal]:
        """Return the token that must follow; where there is a choice, the one that is found, if it may follow."""
        forced = constraint.forced(node.path)
        if forced:
            return [Proposal(forced[0], 0, CERTAIN)]
        found = self._look_up(node.path)
        return [one for one in found if constraint.allows(one.token, node.position, node.path)]

    def _look_up(self, path: tuple[int, ...]) -> list[Proposal]:
        tail = (*self._text[-_LONGEST:], *path)[-_LONGEST:]
        best, length = -1, 0
        for i in reversed(self._after.get(tuple(tail[-_KEY:]), [])[-_LATEST:]):
            matched = self._matched(i, tail)
            if matched > length:
                best, length = i, matched
        # A match of two tokens is little better than chance, one of ten is nearly certain.
        return [Proposal(self._text[best], 0, (length - 1) / 2)] if best >= 0 else []

    def _matched(self, end: int, tail: tuple[int, ...]) -> int:
        """Return how many tokens before `end` in the text equal the last ones of `tail`."""
        matched = 0
        while matched < len(tail) and end - 1 - matched >= 0 and self._text[end - 1 - matched] == tail[-1 - matched]:
            matched += 1
        return matched
