"""Rate what draft sources propose for a node's children by acceptance probability, and learn from the commits.

Sources are numbered from 0, the best one first. The best model, or without models the best source, leads the greedy
spine. What a source proposes is rated in the light of what better ones propose for the same node: where a model
contradicts n-grams they are seldom right, though they are right often enough where the model has not been asked yet. A
token that several sources propose has the largest of their estimates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from edge_agent.drafting.growth import DecodeLatency
from edge_agent.drafting.sources.base import DraftSource, DraftTask, Proposal
from outrider.core.acceptance.calibrator import Agreement, Calibrator
from outrider.core.proposals import CERTAIN
from outrider.core.protocol.messages import MAX_VOCABULARY


@dataclass(eq=False)
class CalibratedSource:
    """A draft source, the calibrators that estimate its acceptance, what a call costs, and what it has yet to read."""

    source: DraftSource
    greedy: Calibrator
    """Of sessions without sampling. All workers of a draft share both calibrators: acceptance hardly depends on the
    session."""
    sampled: Calibrator
    latency: DecodeLatency | None = None
    """Seconds that one `expand` takes, by its number of nodes, which makes the source a model: they decide how many
    nodes a call evaluates, and how likely these must be. None where a call costs nothing worth counting."""
    vocabulary: int = MAX_VOCABULARY
    """A model can evaluate nodes of the ids below it."""
    path: list[int] = field(default_factory=list, init=False)
    """Nodes that became the first of `tokens`."""
    tokens: list[int] = field(default_factory=list, init=False)
    """Committed tokens that a model has not read: it reads them when it is asked again."""
    full: bool = field(default=False, init=False)
    """Whether a model's context has no cells or sequence ids left before a commit frees some."""

    def calibrator(self, task: DraftTask) -> Calibrator:
        """Return the calibrator of a session's sampling: perturbed scores have other margins."""
        return self.greedy if task.sampling.greedy else self.sampled

    def owe(self, path: Sequence[int], tokens: Sequence[int]) -> None:
        """Note committed tokens, of which the nodes `path` carried the first ones, until `catch_up`."""
        if len(self.path) == len(self.tokens):
            self.path += path
        self.tokens += tokens

    def catch_up(self) -> None:
        """Read the committed tokens that are owed."""
        if self.tokens:
            path, tokens, self.path, self.tokens = self.path, self.tokens, [], []
            self.source.advance(path, tokens)


class NodeProposals:
    """The children that all sources propose for one node."""

    def __init__(self) -> None:
        self.children: dict[int, tuple[float, bool]] = {}
        """token -> (acceptance probability given the parent, whether it is on the greedy spine if the parent is: the
        best leading source's first proposal, or the only token that may follow)"""
        self._by_source: dict[int, tuple[Calibrator, int, Sequence[Proposal]]] = {}
        """Number of a source -> (its calibrator, the depth of the children when it was asked, its proposals)."""
        self._leading: set[int] = set()

    def add(
        self, number: int, calibrator: Calibrator, proposals: Sequence[Proposal], depth: int, *, leads: bool
    ) -> None:
        """Add the proposals of one source.

        number: the source's, 0 for the best one. depth: of the children, below the last committed token. leads: whether
        the source's first proposals make the greedy spine, where no better one does.
        """
        if proposals or number not in self._by_source:
            self._by_source[number] = calibrator, depth, proposals
            if leads and proposals:
                self._leading.add(number)
        spine = min(self._leading, default=None)
        self.children = {}
        for source, (its_calibrator, its_depth, _) in sorted(self._by_source.items()):
            for one, agreement in self._compared(source):
                certain = one.margin == CERTAIN
                acceptance, first = self.children.get(one.token, (0.0, False))
                rated = 1.0 if certain else its_calibrator.probability(one.rank, one.margin, its_depth, agreement)
                first |= certain or (source == spine and one.rank == 0)
                self.children[one.token] = (max(acceptance, rated), first)

    def learn(self, token: int) -> None:
        """Update the calibrators with the token that the target committed here."""
        for number, (calibrator, depth, _) in self._by_source.items():
            for one, agreement in self._compared(number):
                if one.margin == CERTAIN:
                    continue
                calibrator.observe(one.rank, one.margin, depth, one.token == token, Agreement.UNKNOWN)
                if agreement is not Agreement.UNKNOWN:
                    calibrator.observe(one.rank, one.margin, depth, one.token == token, agreement)

    def _compared(self, number: int) -> list[tuple[Proposal, Agreement]]:
        """Return a source's proposals, each with what better sources say of it."""
        ranks: dict[int, int] = {}
        for source, (_, _, proposals) in self._by_source.items():
            if source < number:
                for one in proposals:
                    ranks[one.token] = min(one.rank, ranks.get(one.token, one.rank))
        _, _, own = self._by_source[number]
        if not ranks:
            return [(one, Agreement.UNKNOWN) for one in own]
        return [(one, _agreement(ranks.get(one.token))) for one in own]


def _agreement(rank: int | None) -> Agreement:
    """Return what better sources say of a token. rank: the best that they give it; None where none has it."""
    return Agreement.MISSING if rank is None else Agreement.LATER if rank else Agreement.FIRST
