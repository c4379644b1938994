"""Allocate as many rows to every session as to every other one: a policy to compare with the product's."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cloud_verifier.engine.row_allocation import Acceptances, CostCurve, NodeCounts


def evenly(sessions: Sequence[Acceptances], rows: int, cost: CostCurve) -> NodeCounts:
    """Allocate all rows, the same number to every session that can use them, whatever its nodes are worth and cost.

    Over any span of steps in each of which a session has rows and could use more nodes than it is granted, no other is
    granted over one node more than it, if the favoured ones come after all others in the next step.
    """
    wants = [len(nodes) for nodes in sessions]
    level = _level(wants, rows)
    counts = [min(want, level) for want in wants]
    favoured = [i for i, want in enumerate(wants) if want > level][: rows - sum(counts)]
    for i in favoured:
        counts[i] += 1
    return tuple(counts), tuple(favoured)


def _level(wants: Collection[int], rows: int) -> int:
    """Return the greatest number at which `rows` suffice if every session gets what it wants up to this number."""
    sharing = len(wants)
    for want in sorted(wants):
        if want > rows // sharing:
            return rows // sharing
        rows -= want
        sharing -= 1
    return max(wants, default=0)
