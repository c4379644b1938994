"""What the voices of a draft say of one node's children: how likely each child is, and what is learned from it.

A second voice (look-up beside a model) is judged in the light of the first: where the model contradicts it, it is
seldom right, though it is right often enough where the model has not been asked yet. Its guesses have no ranks of their
own, so the rows of its calibrator stand for that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edge_agent.drafting.sources.base import Proposal
from outrider.core.acceptance.calibrator import Calibrator

UNCOMPARED, AGREED, LOWER, CONTRADICTED = range(4)
"""A second voice's guess: the leading one has not spoken; has it first; has it, but not first; has not got it."""


@dataclass(frozen=True, slots=True)
class _Said:
    """A proposal as a calibrator knows it."""

    calibrator: Calibrator
    token: int
    rank: int
    margin: float
    depth: int
    first: bool
    """Whether it is the leading voice's first guess."""

    @property
    def accept(self) -> float:
        return self.calibrator.probability(self.rank, self.margin, self.depth)


class NodeProposals:
    """Of one node."""

    def __init__(self) -> None:
        self._leading: dict[int, _Said] = {}
        """By token."""
        self._second: list[_Said] = []
        """Uncompared."""
        self._compared: list[_Said] = []

    def lead(self, calibrator: Calibrator, proposals: Sequence[Proposal], depth: int) -> None:
        """What the leading voice proposes. depth: of the children, below the last committed token."""
        self._leading |= {p.token: _Said(calibrator, p.token, p.rank, p.margin, depth, p.rank == 0) for p in proposals}
        self._compare()

    def second(self, calibrator: Calibrator, proposals: Sequence[Proposal], depth: int) -> None:
        """What the other one proposes; of the same depth."""
        self._second += [_Said(calibrator, p.token, UNCOMPARED, p.margin, depth, False) for p in proposals]
        self._compare()

    def guesses(self) -> dict[int, tuple[float, bool]]:
        """token -> (probability that the target takes it after the parent, whether it is the leading first guess)."""
        found: dict[int, tuple[float, bool]] = {}
        for said in (*self._leading.values(), *(self._compared or self._second)):
            accept, first = found.get(said.token, (0.0, False))
            found[said.token] = (max(accept, said.accept), first or said.first)
        return found

    def led(self, token: int) -> bool | None:
        """Whether the leading voice had this token first; None where it has said nothing."""
        first = next((said for said in self._leading.values() if said.first), None)
        return None if first is None else first.token == token

    def learn(self, token: int) -> None:
        """The target's token is known."""
        for said in (*self._leading.values(), *self._second, *self._compared):
            said.calibrator.observe(said.rank, said.margin, said.depth, said.token == token)

    def _compare(self) -> None:
        if self._leading:
            self._compared = [self._against(said) for said in self._second]

    def _against(self, said: _Said) -> _Said:
        leading = self._leading.get(said.token)
        rank = CONTRADICTED if leading is None else LOWER if leading.rank else AGREED
        return _Said(said.calibrator, said.token, rank, said.margin, said.depth, False)
