"""The search for everybody's windows: of each session's options the one with which the verifier commits most.

    maximise  G = sum E_i / t(sum n_i)     subject to  E_i / t(...) >= least     for each session that has a choice

At the maximum a session's option maximises E_i - price * n_i, with one price for all: commits that a node's time is
worth elsewhere (as in goodput-optimal speculation, arXiv 2406.14066). So two scalars are searched, the length of the
step and the price; what they leave, since windows are whole numbers, single changes then pick up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coordinator.records import Window

PRICES = (0.0, *(0.01 * 1.15**i for i in range(34)), 1.0)
"""Commits per node; at 1 no node is worth anything, since it commits at most one token."""
FINER = 1.05
"""The total of nodes is searched in steps of this factor."""
FILLED = 32
"""Sessions that get what a price leaves over, for each total."""
PASSES = 3
"""Over all sessions, in search of single changes."""
_BETTER = 1.0 + 1e-9

Floats = NDArray[np.float64]
Choice = NDArray[np.int64]
"""`[sessions]`: the number of an option of each."""
StepSeconds = Callable[[ArrayLike], Floats]
"""Nodes of all sessions together `[n]` -> seconds of a step `[n]`."""


@dataclass(frozen=True)
class Option:
    """A window and what a step's time then brings and takes, on average."""

    window: Window
    tokens: float = 1.0
    nodes: float = 0.0
    tokens_per_step: float = 1.0
    """A step that waits takes longer than its usual time."""
    given: bool = False
    """Not ours to choose, fair or not: its session has no other."""

    def gain(self, min_acceptance: float) -> float:
        return self.tokens - min_acceptance * self.nodes


@dataclass(frozen=True)
class Balance:
    """Everybody's option at one price."""

    min_acceptance: float
    chosen: Choice
    tokens: float
    """Of all in a step."""
    nodes: float
    step_s: float
    slowest: float
    """Tokens per second of the slowest session that has a choice."""

    @property
    def goodput(self) -> float:
        return self.tokens / self.step_s


class Tables:
    """Everybody's options, as arrays `[sessions, options]`; streaming, or what is given, comes first in each."""

    def __init__(self, options: Sequence[Sequence[Option]], step_s: StepSeconds) -> None:
        """options: at least one session's, none of them empty."""
        self.options = options
        self._step_s = step_s
        shape = len(options), max(map(len, options))
        self._tokens = np.full(shape, -math.inf)
        """Of no option: -inf, which is neither fair nor better than any."""
        self._nodes = np.zeros(shape)
        for i, table in enumerate(options):
            self._tokens[i, : len(table)] = [option.tokens for option in table]
            self._nodes[i, : len(table)] = [option.nodes for option in table]
        self._given = np.array([table[0].given for table in options])
        self._rows = np.arange(len(options))

    @property
    def given_nodes(self) -> float:
        """That a step has anyhow."""
        return float(self._nodes[self._given, 0].sum())

    def of(self, min_acceptance: float, chosen: ArrayLike) -> Balance:
        """What comes of these options."""
        choice: Choice = np.asarray(chosen, dtype=np.int64)
        tokens = self._tokens[self._rows, choice]
        nodes = float(self._nodes[self._rows, choice].sum())
        step_s = float(self._step_s(nodes))
        slowest = float(tokens[~self._given].min(initial=math.inf))
        return Balance(min_acceptance, choice, float(tokens.sum()), nodes, step_s, slowest / step_s)

    def node_min_acceptance(self, balance: Balance) -> float:
        """Commits that the time of one node more is worth, at most 1."""
        longer_s = float(self._step_s(balance.nodes + 1.0)) - balance.step_s
        return min(1.0, balance.goodput * max(0.0, longer_s))

    def polished(self, best: Balance, least: float, stick: float = 0.0) -> Balance:
        """As long as one session's change makes the goodput greater, and is fair, make it.

        stick: share of the session's own tokens per second that a change must add at least.
        """
        for _ in range(PASSES):
            before = best
            for i in self._rows[~self._given]:
                best = self._changed(best, int(i), least, stick)
            if best is before:
                break
        return best

    def best(self, least: float) -> Balance:
        """The greatest goodput with which nobody gets fewer tokens per second than `least`.

        By the length of the step: it says which windows keep a session fast enough, and how many nodes there may be.
        """
        best = self.of(PRICES[-1], np.zeros(len(self.options)))
        for nodes in _totals(float(self._nodes.max(axis=1).sum())):
            fair = self._given[:, None] | (self._tokens >= least * float(self._step_s(nodes)))
            if not fair.any(axis=1).all():
                break  # a longer step would ask still more of everybody
            balance = self._within(nodes, fair)
            if balance.nodes <= nodes and balance.goodput > best.goodput:
                best = balance
        return self.polished(best, least)

    def _within(self, limit: float, fair: NDArray[np.bool_]) -> Balance:
        """The options at the lowest price at which they take no more nodes; at the highest one they may still."""
        low, high = 0, len(PRICES) - 1
        while low < high:
            middle = (low + high) // 2
            if self._nodes[self._rows, self._at(PRICES[middle], fair)].sum() <= limit:
                high = middle
            else:
                low = middle + 1
        return self.of(PRICES[low], self._filled(limit, self._at(PRICES[low], fair), fair))

    def _at(self, min_acceptance: float, fair: NDArray[np.bool_]) -> Choice:
        gains = np.where(fair, self._tokens - min_acceptance * self._nodes, -math.inf)
        best: Choice = gains.argmax(axis=1)
        return best

    def _filled(self, limit: float, chosen: Choice, fair: NDArray[np.bool_]) -> Choice:
        """What is left of the nodes, since a price takes or leaves a window whole, goes to whom it gives most.

        To FILLED at most: of many sessions that are alike a price takes all or none, and one by one would take long.
        """
        for _ in range(FILLED):
            tokens, nodes = self._tokens[self._rows, chosen], self._nodes[self._rows, chosen]
            spare = limit - nodes.sum()
            fits = fair & (self._nodes <= nodes[:, None] + spare)
            more = np.where(fits, self._tokens - tokens[:, None], 0.0)
            i, option = np.unravel_index(more.argmax(), more.shape)
            if spare <= 0.0 or more[i, option] <= 0.0:
                return chosen
            chosen[i] = option
        return chosen

    def _changed(self, balance: Balance, i: int, least: float, stick: float) -> Balance:
        """With the option of one session that is best for all beside the others' as they are."""
        chosen = balance.chosen
        tokens = balance.tokens - self._tokens[i, chosen[i]] + self._tokens[i]
        nodes = balance.nodes - self._nodes[i, chosen[i]] + self._nodes[i]
        step_s = self._step_s(nodes)
        others = ~self._given & (self._rows != i)
        slowest = np.minimum(self._tokens[i], self._tokens[self._rows, chosen][others].min(initial=math.inf))
        goodput = np.where(slowest >= least * step_s, tokens / step_s, -math.inf)
        option = int(goodput.argmax())
        sticks = stick * self._tokens[i, chosen[i]] / balance.step_s
        if goodput[option] <= balance.goodput * _BETTER + sticks:
            return balance
        return self.of(balance.min_acceptance, np.where(self._rows == i, option, chosen))


def _totals(most: float) -> Iterator[float]:
    """Numbers of nodes to try, up to the one that brings everybody's window to its widest."""
    nodes = 0.5
    while nodes < most:
        yield nodes
        nodes *= FINER
    yield most
