"""Record a drafter's predictions when it hands a node over, and judge them once the outcome is known.

Handed over means harvested by the driver to be sent next: from then on a prediction is fixed, whatever is learned while
the message waits to go out. A node that is never sent after all is judged like the others.
"""

from __future__ import annotations

from collections.abc import Sequence

from edge_agent.drafting.calibrated_source import CalibratedSource
from edge_agent.drafting.drafter import Drafter, DraftUpdate
from edge_agent.drafting.growth import SpeculationPlan
from edge_agent.drafting.sources.base import DraftTask
from outrider.core.tree import ROOT

MOST = 2_000
"""Most predictions that are kept of a session."""


class ProbedDrafter(Drafter):
    """Record each node's path acceptance as estimated when it was handed over, and whether its whole path became text.

    Nodes about which nothing is decided when the session ends are left out.
    """

    def __init__(self, sources: Sequence[CalibratedSource]) -> None:
        super().__init__(sources)
        self.settled: list[tuple[float, bool]] = []
        """The first MOST pairs (path acceptance, whether the path became text)."""
        self._open: dict[int, float] = {}
        """Node -> its path acceptance when it was handed over."""

    def begin(self, task: DraftTask, plan: SpeculationPlan) -> None:
        self._open = {}
        super().begin(task, plan)

    def harvest(self, *, moved: bool) -> DraftUpdate | None:
        growth = super().harvest(moved=moved)
        if growth is not None and growth.nodes:
            acceptances = {item.node.id: item.path_acceptance for item in self._ranked()}
            self._open |= {node.id: acceptances[node.id] for node in growth.nodes}
        return growth

    def advance(self, tokens: Sequence[int]) -> None:
        came = self._path(tokens)
        super().advance(tokens)
        living = {node.id for node in self._tree}
        for node in [node for node in self._open if node not in living]:
            acceptance = self._open.pop(node)
            if len(self.settled) < MOST:
                self.settled.append((acceptance, node in came))

    def _path(self, tokens: Sequence[int]) -> set[int]:
        """Return the nodes on the path that carries these tokens."""
        at, found = ROOT, set()
        for token in tokens:
            child = self._tree.child(at, token)
            if child is None:
                break
            found.add(at := child)
        return found
