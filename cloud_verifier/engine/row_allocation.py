"""How the rows that a step has for nodes are shared among sessions: one function, of which there are two.

An ordering sees each session's nodes by what they are worth to the verifier
(outrider.core.acceptance.node_acceptance), the best first, and
what the step would cost with so many nodes. It says how many of its best nodes each session gets.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Worth = tuple[float, ...]
"""Survival (0..1) of a session's nodes, the best first."""
Cost = Callable[[NDArray[np.int64]], NDArray[np.float64]]
"""Nodes in a step `[n]` -> its seconds `[n]`."""


@dataclass(frozen=True)
class Shares:
    """What each session gets, in the order in which they were given."""

    nodes: tuple[int, ...]
    lucky: tuple[int, ...] = ()
    """Those that got a row which another could have used as well; next time they come after all others."""


class AllocationPolicy(Protocol):
    """Says what each session gets."""

    def __call__(self, worths: Sequence[Worth], rows: int, cost: Cost, beside: float = 0.0) -> Shares:
        """worths: of the nodes of each session that gets its plain row. rows: that there are for nodes.

        beside: tokens that the step is expected to commit beside these nodes and one for each of the sessions.
        """


def by_worth(worths: Sequence[Worth], rows: int, cost: Cost, beside: float = 0.0) -> Shares:
    """The nodes that make the step's expected commits per second greatest, whosever they are.

    A step commits one token per session and, of its nodes, the sum of their worth. Taken by falling worth, nodes pay as
    long as the next one is worth more than what its time would have committed otherwise.
    """
    best_first = sorted(((worth, i) for i, worths_of_one in enumerate(worths) for worth in worths_of_one), key=_falling)
    offered = best_first[:rows]
    commits = len(worths) + beside + np.concatenate(([0.0], np.cumsum([worth for worth, _ in offered])))
    taken = int(np.argmax(commits / cost(np.arange(len(offered) + 1)))) if offered else 0
    nodes = [0] * len(worths)
    for _, i in best_first[:taken]:
        nodes[i] += 1
    refused = best_first[taken][0] if taken < len(best_first) else -1.0
    lucky = tuple(i for i, count in enumerate(nodes) if count and worths[i][count - 1] == refused)
    return Shares(tuple(nodes), lucky)


def evenly(worths: Sequence[Worth], rows: int, cost: Cost, beside: float = 0.0) -> Shares:
    """As many as there are rows, the same for everyone who can use them, whatever they are worth and cost.

    Over any span of steps in each of which a session has rows and could use more nodes than it is granted, no other is
    granted over one node more than it, if the lucky ones come after the others in the next step.
    """
    wants = [len(worth) for worth in worths]
    level = _level(wants, rows)
    nodes = [min(want, level) for want in wants]
    lucky = [i for i, want in enumerate(wants) if want > level][: rows - sum(nodes)]
    for i in lucky:
        nodes[i] += 1
    return Shares(tuple(nodes), tuple(lucky))


def with_half_threshold(ordering: AllocationPolicy) -> AllocationPolicy:
    """The same, as if nodes cost half: a step in a while is spent so, since what is never tried is never measured."""

    def shares(worths: Sequence[Worth], rows: int, cost: Cost, beside: float = 0.0) -> Shares:
        plain = cost(np.zeros(1, dtype=np.int64))
        return ordering(worths, rows, lambda nodes: (plain + cost(nodes)) / 2, beside)

    return shares


ORDERINGS: dict[str, AllocationPolicy] = {"worth": by_worth, "even": evenly}


def _falling(offer: tuple[float, int]) -> float:
    return -offer[0]


def _level(wants: Collection[int], rows: int) -> int:
    """The greatest level at which all fit into `rows` if everyone gets what it wants up to this level."""
    sharing = len(wants)
    for want in sorted(wants):
        if want > rows // sharing:
            return rows // sharing
        rows -= want
        sharing -= 1
    return max(wants, default=0)
