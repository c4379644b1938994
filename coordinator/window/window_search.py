"""Search the windows of all sessions together: of each session's options the one with which the verifier commits most.

    maximise  G = sum E_i / t(sum n_i)     subject to  E_i / t(...) >= least     for each session that has a choice

At the maximum a session's option maximises E_i - m * n_i, with one m for all: min_acceptance, the commits that a
node's time would bring in other sessions (as in goodput-optimal speculation, arXiv 2406.14066). So two scalars are
searched, the length of the step and min_acceptance; what they leave, since windows are whole numbers, single changes
then pick up.

An option is fair up to a length of the step. So the best fair option at one min_acceptance is the best of the first few
if a session's options are sorted by their tokens, which is tabulated for every min_acceptance and every such few.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

MIN_ACCEPTANCES = np.array((0.0, *(0.01 * 1.15**i for i in range(34)), 1.0))
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
    """The options of all sessions, as arrays `[sessions, options]`; streaming, or the given option, comes first.

    tokens, nodes: what an option brings and takes per length of a step, on average; where there is no such option
    tokens are -inf, which is neither fair nor better than any. given: `[sessions]`, whether the first option is the
    only one, fair or not.
    """

    def __init__(self, tokens: Floats, nodes: Floats, given: NDArray[np.bool_], step_s: StepSeconds) -> None:
        self.tokens, self.nodes = tokens, nodes
        self._step_s = step_s
        self._given = given
        self._rows = np.arange(len(tokens))

    @property
    def given_nodes(self) -> float:
        """Return the nodes that a step has in any case."""
        return float(self.nodes[self._given, 0].sum())

    def of(self, min_acceptance: float, chosen: ArrayLike) -> Balance:
        """Return what comes of these options. chosen: `[sessions]`."""
        choice: Choice = np.asarray(chosen, dtype=np.int64)
        tokens = self.tokens[self._rows, choice]
        nodes = float(self.nodes[self._rows, choice].sum())
        step_s = float(self._step_s(nodes))
        slowest = float(tokens[~self._given].min(initial=math.inf))
        return Balance(min_acceptance, choice, float(tokens.sum()), nodes, step_s, slowest / step_s)

    def gains(self, min_acceptance: float) -> Floats:
        """Return the tokens `[sessions, options]` less those that the nodes' time would bring in other sessions."""
        return self.tokens - min_acceptance * self.nodes

    def node_min_acceptance(self, balance: Balance) -> float:
        """Return the commits that the time of one more node would bring otherwise, at most 1."""
        longer_s = float(self._step_s(balance.nodes + 1.0)) - balance.step_s
        return min(1.0, balance.goodput * max(0.0, longer_s))

    def polished(self, best: Balance, least: float, stick: float = 0.0) -> Balance:
        """Change single sessions' options as long as that makes the goodput greater and is fair.

        stick: share of the session's own tokens per second that a change must add at least.
        """
        for _ in range(PASSES):
            before, i = best, 0
            while i < len(self._rows):
                best, i = self._changed(best, i, least, stick)
            if best is before:
                break
        return best

    def best(self, least: float) -> Balance:
        """Return the balance of the greatest goodput with at least `least` tokens per second for every session.

        It tries lengths of the step: they say which windows keep a session fast enough, and how many nodes there may
        be.
        """
        found = self.of(1.0, np.zeros(len(self._rows)))
        totals = _totals(float(self.nodes.max(axis=1).sum()))
        asked = least * self._step_s(totals)
        # A longer step than the last that is fair would ask still more of every session.
        fair = asked <= self.tokens[~self._given].max(axis=1).min(initial=math.inf)
        totals, asked = totals[fair], asked[fair]
        found_at = len(totals)
        numbers, chosen, bounds = self._within(totals, asked)
        for at in np.argsort(-bounds, kind="stable").tolist():  # the first of the best, though the last in this order
            if bounds[at] <= found.goodput and (at > found_at or bounds[at] * _BETTER < found.goodput):
                continue
            allowed = self._given[:, None] | (self.tokens >= asked[at])
            choice = self._filled(float(totals[at]), chosen[at], allowed)
            balance = self.of(float(MIN_ACCEPTANCES[numbers[at]]), choice)
            if balance.nodes <= totals[at] and (balance.goodput, -at) > (found.goodput, -found_at):
                found_at, found = at, balance
        return self.polished(found, least)

    def _within(self, totals: Floats, asked: Floats) -> tuple[Choice, Choice, Floats]:
        """Return for each total of nodes the least min_acceptance that takes no more, or else the greatest, by number.

        asked: tokens that a fair option brings, for each total, never falling. Also returns the options
        `[totals, sessions]`, and the goodput `[totals]` that no choice with as many nodes or less exceeds, -inf if
        there is no such choice.
        """
        count, options = self.tokens.shape
        order = np.argsort(-self.tokens, axis=1, kind="stable")
        tokens, nodes = (np.take_along_axis(each, order, axis=1) for each in (self.tokens, self.nodes))
        best = np.empty((len(MIN_ACCEPTANCES), options, count), dtype=np.int64)
        best_nodes = np.empty(best.shape)
        gain = np.full((len(MIN_ACCEPTANCES), count), -math.inf)
        option, taken = np.zeros(gain.shape, dtype=np.int64), np.zeros(gain.shape)
        # By total: how many of a session's options are fair, the ones with the most tokens.
        fair = np.zeros((len(totals), count), dtype=np.int64)
        fair_until = np.searchsorted(asked, np.where(self._given[:, None], math.inf, tokens), side="right")
        for i in range(options):
            gains = tokens[:, i] - MIN_ACCEPTANCES[:, None] * nodes[:, i]
            better = gains > gain
            np.copyto(gain, gains, where=better)
            np.copyto(option, order[:, i], where=better)
            np.copyto(taken, nodes[:, i], where=better)
            best[:, i], best_nodes[:, i] = option, taken
            fair += fair_until[:, i] > np.arange(len(totals))[:, None]
        place = (fair - 1) * count + self._rows
        low, high = np.zeros(len(totals), dtype=np.int64), np.full(len(totals), len(MIN_ACCEPTANCES) - 1)
        while (low < high).any():
            middle = (low + high) // 2
            fits = best_nodes.ravel().take(place + middle[:, None] * options * count).sum(axis=1) <= totals
            high = np.where(fits, middle, high)
            low = np.where(fits, low, np.minimum(middle + 1, high))
        chosen, least_nodes = (each.ravel().take(place + low[:, None] * options * count) for each in (best, best_nodes))
        least_nodes = least_nodes.sum(axis=1)
        # More nodes bring min_acceptance each at most, and less than at the next lower one; the step is linear between
        # whole numbers of them.
        spare = totals - least_nodes
        more = np.clip(
            np.arange(math.ceil(spare.max(initial=0.0)) + 2) - least_nodes[:, None] % 1.0, 0.0, spare[:, None]
        )
        most = np.full(more.shape, math.inf)
        for number in (low, np.maximum(low - 1, 0)):
            at = place + number[:, None] * options * count
            line = self.tokens[self._rows, best.ravel().take(at)].sum(axis=1) - MIN_ACCEPTANCES[
                number
            ] * best_nodes.ravel().take(at).sum(axis=1)
            most = np.minimum(most, line[:, None] + MIN_ACCEPTANCES[number, None] * (least_nodes[:, None] + more))
        bounds = (most / self._step_s(least_nodes[:, None] + more)).max(axis=1)
        return low, chosen, np.where(spare >= 0.0, bounds, -math.inf)

    def _filled(self, limit: float, chosen: Choice, fair: NDArray[np.bool_]) -> Choice:
        """Give the nodes that are left, since windows are whole, to the sessions that they bring most, FILLED at most.

        Of many equal sessions one min_acceptance takes all or none, and one by one would take long.
        """
        choice, options = chosen.copy(), self.tokens.shape[1]
        spare = limit - float(self.nodes[self._rows, chosen].sum())
        more = (self.tokens - self.tokens[self._rows, chosen][:, None]).ravel()
        sizes = (self.nodes - self.nodes[self._rows, chosen][:, None]).ravel()
        places = np.flatnonzero(fair.ravel() & (sizes <= spare) & (more > 0.0))
        places = places[np.argsort(-more[places], kind="stable")]
        sizes = sizes[places]
        # Less and less is spare: what does not fit will not fit later, unless its session has got something. What such
        # a session can still get is listed anew, as (tokens less, place, nodes more, the option that it has).
        anew: list[tuple[float, int, float, int]] = []
        for _ in range(FILLED):
            while anew and (anew[0][2] > spare or anew[0][3] != choice[anew[0][1] // options]):
                heapq.heappop(anew)
            fits = sizes <= spare
            at = int(fits.argmax()) if len(fits) else 0
            best = anew[0] if anew else (0.0, 0, 0.0, 0)
            if len(fits) and fits[at]:
                best = min(best, (-float(more[places[at]]), int(places[at]), float(sizes[at]), 0))
            if spare <= 0.0 or best[0] == 0.0:
                break
            i, option = divmod(best[1], options)
            spare -= best[2]
            choice[i] = option
            others = places // options != i
            others[:at] = False
            places, sizes = places[others], sizes[others]
            tokens, nodes = self.tokens[i].tolist(), self.nodes[i].tolist()
            for other in np.flatnonzero(fair[i]).tolist():
                if tokens[other] > tokens[option]:
                    size = nodes[other] - nodes[option]
                    heapq.heappush(anew, (tokens[option] - tokens[other], i * options + other, size, option))
        return choice

    def _changed(self, balance: Balance, since: int, least: float, stick: float) -> tuple[Balance, int]:
        """Return the balance with the best option of one session, the others' options as they are, and the next one.

        It is the first session from `since` on that such a change makes better; without one, the balance is the same.
        """
        rows, chosen = self._rows[since:], balance.chosen
        mine = self.tokens[self._rows, chosen]
        others = np.where(self._given, math.inf, mine)
        slowest = int(others.argmin())
        least_other = np.full(len(others), others[slowest])
        least_other[slowest] = np.delete(others, slowest).min(initial=math.inf)
        own_nodes = self.nodes[rows, chosen[rows]]
        tokens = balance.tokens - mine[rows, None] + self.tokens[rows]
        step_s = self._step_s(balance.nodes - own_nodes[:, None] + self.nodes[rows])
        fair = np.minimum(self.tokens[rows], least_other[rows, None]) >= least * step_s
        goodput = np.where(fair & ~self._given[rows, None], tokens / step_s, -math.inf)
        enough = balance.goodput * _BETTER + stick * mine[rows] / balance.step_s
        better = goodput.max(axis=1) > enough
        if not better.any():
            return balance, len(self._rows)
        i = int(better.argmax())
        choice = np.where(self._rows == rows[i], int(goodput[i].argmax()), chosen)
        return self.of(balance.min_acceptance, choice), since + i + 1


def _totals(most: float) -> Floats:
    """Return the totals of nodes to try, up to the one with every session's widest window."""
    totals = []
    nodes = 0.5
    while nodes < most:
        totals.append(nodes)
        nodes *= FINER
    return np.array([*totals, most])
