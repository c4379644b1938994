"""Rate what draft sources propose for a node's children by acceptance probability, and learn from the commits.

A secondary source (n-gram lookup beside a model) is rated in the light of the leading one: where the model contradicts
it, it is seldom right, though it is right often enough where the model has not been asked yet. Its proposals have no
ranks of their own, so the rows of its calibrator stand for these cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from edge_agent.drafting.sources.base import DraftSource, DraftTask, Proposal
from outrider.core.acceptance.calibrator import Calibrator
from outrider.core.proposals import CERTAIN

UNCOMPARED, AGREED, LOWER, CONTRADICTED = range(4)
"""Ranks of a secondary proposal: the leading source was not asked; has it first; has it, but not first; has it not."""


@dataclass(frozen=True)
class CalibratedSource:
    """A draft source and the calibrators that estimate its acceptance."""

    source: DraftSource
    greedy: Calibrator
    sampled: Calibrator
    leads: bool = True
    """Whether its first proposals make the greedy spine."""

    def calibrator(self, task: DraftTask) -> Calibrator:
        """Return the calibrator of a session's sampling: perturbed scores have other margins."""
        return self.greedy if task.sampling.greedy else self.sampled


@dataclass(frozen=True, slots=True)
class _RatedProposal:
    """A proposal and the features by which its calibrator rates it."""

    calibrator: Calibrator
    token: int
    rank: int
    margin: float
    depth: int
    first: bool
    """Whether it is the leading source's first proposal, or the only token that may follow."""

    @property
    def acceptance(self) -> float:
        return 1.0 if self.margin == CERTAIN else self.calibrator.probability(self.rank, self.margin, self.depth)

    def learn(self, token: int) -> None:
        """Update the calibrator with the token that the target committed in the proposal's place."""
        if self.margin != CERTAIN:
            self.calibrator.observe(self.rank, self.margin, self.depth, self.token == token)


class NodeProposals:
    """The children that all sources propose for one node."""

    def __init__(self) -> None:
        self.children: dict[int, tuple[float, bool]] = {}
        """token -> (acceptance probability given the parent, whether it is the leading source's first proposal, or the
        only token that may follow)"""
        self._leading: dict[int, _RatedProposal] = {}
        """By token."""
        self._secondary: list[_RatedProposal] = []
        """Rated as if the leading source had not been asked."""
        self._compared: list[_RatedProposal] = []
        """The secondary proposals again, rated by what the leading source says of them."""

    def add(self, calibrator: Calibrator, proposals: Sequence[Proposal], depth: int, *, leads: bool) -> None:
        """Add the proposals of one source.

        depth: of the children, below the last committed token. leads: whether this is the leading source.
        """
        if leads:
            self._leading |= {
                p.token: _RatedProposal(calibrator, p.token, p.rank, p.margin, depth, p.rank == 0) for p in proposals
            }
        else:
            self._secondary += [
                _RatedProposal(calibrator, p.token, UNCOMPARED, p.margin, depth, p.margin == CERTAIN) for p in proposals
            ]
        if self._leading:
            self._compared = [replace(p, rank=self._comparison(p.token)) for p in self._secondary]
        self.children = {}
        for rated in (*self._leading.values(), *(self._compared or self._secondary)):
            acceptance, first = self.children.get(rated.token, (0.0, False))
            self.children[rated.token] = (max(acceptance, rated.acceptance), first or rated.first)

    def predicted(self, token: int) -> bool | None:
        """Return whether the leading source proposed this token first; None where it had nothing to choose."""
        own = (rated for rated in self._leading.values() if rated.first and rated.margin != CERTAIN)
        return next((rated.token == token for rated in own), None)

    def learn(self, token: int) -> None:
        """Update the calibrators with the token that the target committed here."""
        for rated in (*self._leading.values(), *self._secondary, *self._compared):
            rated.learn(token)

    def _comparison(self, token: int) -> int:
        """Return the rank of a secondary proposal by what the leading source proposed."""
        leading = self._leading.get(token)
        return CONTRADICTED if leading is None else LOWER if leading.rank else AGREED
