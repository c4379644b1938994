"""Define the interface of a draft source: it proposes children for nodes of the session's token tree."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.core.constraint import Constraint, GrammarState, constraint_of
from outrider.core.coupling import session_key
from outrider.core.proposals import Proposal
from outrider.core.protocol.device import DeviceSession
from outrider.core.sampling import SamplingParams

__all__ = ["DraftSource", "DraftTask", "NodeContext", "Proposal"]


@dataclass(frozen=True)
class DraftTask:
    """The sequence to draft for, as it stands when drafting begins."""

    prompt: tuple[int, ...]
    received: tuple[int, ...] = ()
    """Tokens generated so far."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 256
    ends: frozenset[int] = frozenset()
    """Token ids that end the sequence: nothing is drafted below them."""
    grammar: Callable[[], GrammarState] | None = None
    """Returns the state of the sequence's grammar before the first token; None for no grammar."""
    min_tokens: int = 0
    """Position before which no end may come."""

    @classmethod
    def of(cls, session: DeviceSession, grammar: Callable[[], GrammarState] | None) -> DraftTask:
        """Return the sequence of a session as it stands. grammar: as below."""
        return cls(
            session.prompt,
            tuple(session.received),
            session.sampling,
            session.max_tokens,
            session.end_token_ids,
            grammar,
            session.request.min_tokens,
        )

    @functools.cached_property
    def key(self) -> int:
        """Return the key of the session's noise; 0 for greedy sampling, which has none."""
        return 0 if self.sampling.greedy else session_key(self.sampling.seed, self.prompt)

    def constraint(self) -> Constraint | None:
        """Return a new one that stands at the end of `received`; None if any token may follow. Raises BadRequest."""
        grammar = self.grammar() if self.grammar is not None else None
        return constraint_of(grammar, self.ends, self.min_tokens, self.received)


@dataclass(frozen=True)
class NodeContext:
    """A node of the tree, or its root, and the tokens that lead to it."""

    id: int
    """0 for the root, the committed sequence."""
    parent: int
    token: int
    """-1 for the root."""
    position: int
    """Generated tokens up to and including the node: its children have this position."""
    path: tuple[int, ...]
    """Tokens from below the root down to the node, itself included."""
    wanted: bool = True
    """Whether proposals for its children are wanted, or it is evaluated for the sake of nodes below it alone."""


class DraftSource(Protocol):
    """A source that proposes tokens, all on one thread. If one fails, the session goes on without the draft."""

    def begin(self, task: DraftTask) -> None:
        """Read the prompt and the received tokens; drop everything of an earlier session."""

    def advance(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Commit `tokens`, of which the nodes `path`, a chain from below the root, carried the first ones.

        If the path is as long as `tokens`, its last node becomes the root, and what descends from it survives.
        """

    def expand(self, nodes: Sequence[NodeContext]) -> list[list[Proposal]]:
        """Return proposals for each node, best first; none for those of which they are not wanted.

        A node's parent was expanded before, is the root, or comes before it in this call, where it has no other child.
        """

    def knows(self, token: int) -> bool:
        """Return whether the source can evaluate a node of this token."""
