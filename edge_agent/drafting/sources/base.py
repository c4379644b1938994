"""What a draft source is: something that proposes children for nodes of the session's tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.core.proposals import Proposal
from outrider.core.sampling import SamplingParams

__all__ = ["DraftSource", "DraftTask", "Proposal", "NodeContext"]


@dataclass(frozen=True)
class DraftTask:
    """The session that is drafted for."""

    prompt: tuple[int, ...]
    received: tuple[int, ...] = ()
    """Generated tokens so far."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int = 256
    ends: frozenset[int] = frozenset()
    """Token ids that end the sequence: nothing is drafted below them."""


@dataclass(frozen=True)
class NodeContext:
    """A node (or the root) as a source sees it."""

    id: int
    """0 is the root: the committed sequence."""
    parent: int
    token: int
    """-1 for the root"""
    position: int
    """Generated tokens up to and including the node: its children have this position."""
    path: tuple[int, ...]
    """Tokens from below the root down to the node, itself included."""


class DraftSource(Protocol):
    """All methods are called on one thread. An exception ends drafting for the session, never the session."""

    def begin(self, task: DraftTask) -> None:
        """Take in prompt and received tokens; whatever was held before is dropped."""

    def advance(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        """`tokens` were committed; the nodes `path`, a chain from below the root, carried the first of them.

        The last node of a path as long as `tokens` is the root from now on; what descends from it survives.
        """

    def expand(self, spots: Sequence[NodeContext]) -> list[list[Proposal]]:
        """Proposals for each spot, best first. The parent of a spot was expanded before, or is the root."""
