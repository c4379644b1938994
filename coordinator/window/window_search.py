"""Search the windows of all sessions together: of each session's options the one with which the verifier commits most.

    maximise  G = sum E_i / t(sum n_i)     subject to  E_i / t(...) >= least     for each session that has a choice

At the maximum a session's option maximises E_i - m * n_i, with one m for all: min_acceptance, the commits that a
node's time would bring in other sessions (as in goodput-optimal speculation, arXiv 2406.14066). So two scalars are
searched, the length of the step and min_acceptance; what they leave, since windows are whole numbers, single changes
then pick up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coordinator.records import Window

MIN_ACCEPTANCES = (0.0, *(0.01 * 1.15**i for i in range(34)), 1.0)
"""Values of min_acceptance that are tried; at 1 no node pays, since it commits at most one token."""
FINER = 1.05
"""Factor between the totals of nodes that are tried."""
FILLED = 32
"""Most sessions that get the nodes which one min_acceptance leaves over, for each total."""
PASSES = 3
"""Passes over all sessions in search of single changes."""
_BETTER = 1.0 + 1e-9

Floats = NDArray[np.float64]
Choice = NDArray[np.int64]
"""`[sessions]`: the number of an option of each."""
StepSeconds = Callable[[ArrayLike], Floats]
"""Nodes of all sessions together `[n]` -> seconds of a step `[n]`."""


@dataclass(frozen=True)
class Option:
    """A window with the tokens that it brings and the nodes that it takes per length of a step, on average."""

    window: Window
    tokens: float = 1.0
    nodes: float = 0.0
    tokens_per_step: float = 1.0
    """Tokens of a step, which may have waited for longer than its usual length."""
    given: bool = False
    """The only option of its session, fair or not."""

    def gain(self, min_acceptance: float) -> float:
        """Return the tokens less those that the nodes' time would bring in other sessions."""
        return self.tokens - min_acceptance * self.nodes


@dataclass(frozen=True)
class Balance:
    """One option for every session, and the step that results."""

    min_acceptance: float
    chosen: Choice
    tokens: float
    """Tokens of all sessions in a step."""
    nodes: float
    """Nodes of all sessions in a step."""
    step_s: float
    slowest: float
    """Tokens per second of the slowest session that has a choice."""

    @property
    def goodput(self) -> float:
        return self.tokens / self.step_s


class OptionTables:
    """The options of all sessions, as arrays `[sessions, options]`; streaming, or the given option, comes first."""

    def __init__(self, options: Sequence[Sequence[Option]], step_s: StepSeconds) -> None:
        """Take the options of at least one session, each with at least one option."""
        self.options = options
        self._step_s = step_s
        shape = len(options), max(map(len, options))
        self._tokens = np.full(shape, -math.inf)
        """-inf stands where a session has fewer options: it is neither fair nor better than any."""
        self._nodes = np.zeros(shape)
        for i, table in enumerate(options):
            self._tokens[i, : len(table)] = [option.tokens for option in table]
            self._nodes[i, : len(table)] = [option.nodes for option in table]
        self._given = np.array([table[0].given for table in options])
        self._rows = np.arange(len(options))

    @property
    def given_nodes(self) -> float:
        """Return the nodes that a step has in any case."""
        return float(self._nodes[self._given, 0].sum())

    def of(self, min_acceptance: float, chosen: ArrayLike) -> Balance:
        """Return what comes of these options. chosen: `[sessions]`."""
        choice: Choice = np.asarray(chosen, dtype=np.int64)
        tokens = self._tokens[self._rows, choice]
        nodes = float(self._nodes[self._rows, choice].sum())
        step_s = float(self._step_s(nodes))
        slowest = float(tokens[~self._given].min(initial=math.inf))
        return Balance(min_acceptance, choice, float(tokens.sum()), nodes, step_s, slowest / step_s)

    def node_min_acceptance(self, balance: Balance) -> float:
        """Return the commits that the time of one more node would bring otherwise, at most 1."""
        longer_s = float(self._step_s(balance.nodes + 1.0)) - balance.step_s
        return min(1.0, balance.goodput * max(0.0, longer_s))

    def polished(self, best: Balance, least: float, stick: float = 0.0) -> Balance:
        """Change single sessions' options as long as that makes the goodput greater and is fair.

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
        """Return the balance of the greatest goodput with at least `least` tokens per second for every session.

        It tries lengths of the step: they say which windows keep a session fast enough, and how many nodes there may
        be.
        """
        best = self.of(MIN_ACCEPTANCES[-1], np.zeros(len(self.options)))
        for nodes in _totals(float(self._nodes.max(axis=1).sum())):
            fair = self._given[:, None] | (self._tokens >= least * float(self._step_s(nodes)))
            if not fair.any(axis=1).all():
                break  # a longer step would ask still more of every session
            balance = self._within(nodes, fair)
            if balance.nodes <= nodes and balance.goodput > best.goodput:
                best = balance
        return self.polished(best, least)

    def _within(self, limit: float, fair: NDArray[np.bool_]) -> Balance:
        """Return the options at the least min_acceptance that takes at most `limit` nodes, or else at the greatest."""
        low, high = 0, len(MIN_ACCEPTANCES) - 1
        while low < high:
            middle = (low + high) // 2
            if self._nodes[self._rows, self._at(MIN_ACCEPTANCES[middle], fair)].sum() <= limit:
                high = middle
            else:
                low = middle + 1
        return self.of(MIN_ACCEPTANCES[low], self._filled(limit, self._at(MIN_ACCEPTANCES[low], fair), fair))

    def _at(self, min_acceptance: float, fair: NDArray[np.bool_]) -> Choice:
        gains = np.where(fair, self._tokens - min_acceptance * self._nodes, -math.inf)
        best: Choice = gains.argmax(axis=1)
        return best

    def _filled(self, limit: float, chosen: Choice, fair: NDArray[np.bool_]) -> Choice:
        """Give the nodes that are left, since windows are whole, to the sessions that they bring most, FILLED at most.

        Of many equal sessions one min_acceptance takes all or none, and one by one would take long.
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
        """Return the balance with the best option of one session, the others' options as they are."""
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
    """Yield the totals of nodes to try, up to the one with every session's widest window."""
    nodes = 0.5
    while nodes < most:
        yield nodes
        nodes *= FINER
    yield most
