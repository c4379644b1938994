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
        """Return the sequence of a session as it stands. grammar: as the field of this name."""
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
    """The drafter's number of the node, which it keeps until it is committed or dropped; 0 for the root, the committed
    sequence."""
    parent: int
    """Id of its parent."""
    token: int
    """Token id; -1 for the root."""
    position: int
    """Generated tokens up to and including the node: its children have this position."""
    path: tuple[int, ...]
    """Token ids from below the root down to the node, itself included."""
    wanted: bool = True
    """Whether to return proposals for its children. Where it is false, a model evaluates the node all the same, since
    nodes below it follow. A source that costs nothing gets no such node."""


class DraftSource(Protocol):
    """A source that proposes tokens for one session at a time. The thread that made it makes all calls.

    There are two sorts, which the `latency` of its CalibratedSource tells apart. A model has one: it is asked for
    several nodes at once, and only for what is worth the time. Other sources cost next to nothing, and are asked for
    one node at a time, wherever their proposals could matter.

    Any error but the Overloaded of `expand` ends drafting with all sources of the draft for this session. It goes on by
    n-grams alone if the draft has a model, else without a draft. The error is logged as a warning; a BadRequest, as for
    a text that is too long, as information.

    The target alone enforces what a request asks for: its grammar, `min_tokens`, biases and penalties. A source that
    proposes what they forbid has wasted the node.
    """

    def begin(self, task: DraftTask) -> None:
        """Read the prompt and the received tokens; drop everything of an earlier session.

        All sources of a draft read one after the other before any proposes: a slow one delays the first node.
        When a session ends, a source that costs nothing begins an empty task, so as to drop the text. A model is not
        told, and may keep what it has computed for a session that begins alike.
        """

    def advance(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Commit tokens. tokens: their ids. path: ids of the nodes that carried the first ones, a chain from below the
        root.

        If the path is as long as `tokens`, its last node becomes the root, with the id 0. What descends from it
        survives with its ids, and all other nodes are dropped. Otherwise all nodes are. The path may have nodes of
        other sources, which this one was never asked for. A model gets the tokens of several commits in one call, when
        it is needed again.
        """

    def expand(self, nodes: Sequence[NodeContext]) -> list[list[Proposal]]:
        """Return for each node, in their order, the proposals for its children, best first; none where they are not
        wanted.

        A model evaluates each node of a session once. Its parent is the root, was expanded before, or stands before it
        in this call, and then has no other child in the call. A model that has no room for the nodes raises Overloaded,
        with nothing changed: it is asked again after the next commit, and the other sources go on.
        """
