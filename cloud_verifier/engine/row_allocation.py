"""Allocate the rows that a step has for nodes to sessions, by their nodes' probabilities of acceptance and the cost.

A policy sees, for each session, the acceptance of its nodes as the verifier estimates it
(outrider.core.acceptance.node_acceptance), and what the step would cost with so many nodes. It returns how many of its
best nodes each session gets. The engine uses `by_acceptance`; a benchmark may put another policy into
`Engine.allocation`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Acceptances = tuple[float, ...]
"""Probability (0..1) that each node of a session is accepted, in falling order."""
CostCurve = Callable[[NDArray[np.int64]], NDArray[np.float64]]
"""Nodes in a step `[n]` -> seconds of the step `[n]`."""
NodeCounts = tuple[tuple[int, ...], tuple[int, ...]]
"""(nodes for each session, in the order in which they were given; indices of the favoured sessions).

A favoured session got a row that another could have used as well; in the next step it comes after all others.
"""
AllocationPolicy = Callable[[Sequence[Acceptances], int, CostCurve], NodeCounts]
"""(nodes of each session that gets its plain row, rows there are for nodes, cost) -> counts"""


@dataclass(slots=True)
class RowAllocation:
    """The rows that a session gets in a step: known tokens, and nodes, those of the greatest acceptance.

    The row of the last known token gives the next token.
    """

    session_id: str
    chain: int
    nodes: int


def by_acceptance(sessions: Sequence[Acceptances], rows: int, cost: CostCurve) -> NodeCounts:
    """Take the nodes that make the step's expected commits per second greatest, whatever session they belong to.

    A step commits one token per session and, of its nodes, the sum of their acceptance. Taken in falling order, nodes
    pay as long as the next one is expected to commit more than its time would have committed otherwise.
    """
    best_first = sorted(((chance, i) for i, nodes in enumerate(sessions) for chance in nodes), key=lambda one: -one[0])
    offered = best_first[:rows]
    commits = len(sessions) + np.concatenate(([0.0], np.cumsum([chance for chance, _ in offered])))
    taken = int(np.argmax(commits / cost(np.arange(len(offered) + 1)))) if offered else 0
    counts = [0] * len(sessions)
    for _, i in best_first[:taken]:
        counts[i] += 1
    refused = best_first[taken][0] if taken < len(best_first) else -1.0
    favoured = tuple(i for i, count in enumerate(counts) if count and sessions[i][count - 1] == refused)
    return tuple(counts), favoured
