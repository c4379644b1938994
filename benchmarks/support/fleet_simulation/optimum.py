"""Compute the best possible windows for a verifier's sessions, by means that the controller does not use.

It knows the truth where the controller has estimates: the process that each session's outcomes are drawn from, round
trip, drafting time and the cost of a step. It does not know the future: neither which draft token will be accepted nor
whether a text is in an easy or in a hard passage now, so a window is judged by the process's long run. The controller
sees some hundred outcomes, about five passages, and decides for seconds, about as many: a passage is no news to either.

Expected tokens are found without replaying anything. After a rejected token a device starts afresh from the target's
token, and until the next one everything is determined: which node arrives before which step hangs on the times alone.
So the protocol is a renewal process whose runs are weighed by the chance that they end at each position
(Smith, Regenerative Stochastic Processes, 1955), with two states, since passages outlast runs.

The optimum is a linear program for each length of the step: every session divides its time between windows,
so that the nodes fit into the step and everybody keeps the speed that the controller has to promise. Fractions are
allowed and run-ahead has no end, which no controller has: what it finds is a bound, but for the grid of lengths. Its
totals of nodes are 1% apart around the best, and the lengths of steps by much less.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

HORIZON, RARE = 96, 1e-7
"""Positions of a run at most, and the share of a text's runs that may go on behind the last at which one can end.
A run that is still unbroken then counts as broken (1e-5 of the runs of the best text here)."""
LEVELS = np.array((0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16))
"""Levels per step that a session may ask for."""
ENDLESS = 1 << 20
"""A run-ahead limit that never holds a device back."""
FACTORS = (2.0, 1.25, 1.05, 1.01)
"""Ratios of neighbouring totals of nodes that are tried: first over the whole range, then around the best."""
FEWEST = 0.05
"""Least of those totals, beside 0."""
LENGTHS, NARROWER = 17, 5
"""Lengths of a step that are tried at once, and how often the space between two of them is divided again."""

_NOTHING = 1e-6
"""Tokens or nodes that are too few, and count as none."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class AcceptanceProcess:
    """Describe a draft's outcomes on a kind of text by two states, each with its chance of a right first proposal."""

    easy: float
    hard: float
    flip: float
    """Chance per token that the state changes."""
    caught: float
    """Share of misses that a sibling catches."""


@dataclass(frozen=True)
class SessionTruth:
    """Hold the true values of one session."""

    process: AcceptanceProcess
    rtt_s: float
    draft_s: float
    nodes_per_level: float


@dataclass(frozen=True)
class StaticRequest:
    """Describe a static window: levels per step and the depth to which the device runs ahead."""

    k: int
    depth: int = ENDLESS


@dataclass(frozen=True)
class LongRunOutcome:
    """Hold the long-run output of a verifier."""

    step_s: float
    tokens: tuple[float, ...]
    """Tokens per step of each session."""
    nodes: float = 0.0
    """Nodes for which the step had room, if that was the question."""

    @property
    def goodput(self) -> float:
        return sum(self.tokens) / self.step_s

    def over_streaming(self, plain_s: float) -> list[float]:
        """Return each session's speed over its speed if all streamed, in steps of plain_s."""
        return [tokens * plain_s / self.step_s for tokens in self.tokens]


@dataclass(frozen=True)
class OptimalVerifier:
    """Find the best windows for a verifier's sessions, given what its steps cost."""

    sessions: tuple[SessionTruth, ...]
    step_s: Callable[[Floats], Floats]
    """Nodes of all sessions together, without their last committed tokens -> seconds of a step; it never falls."""

    @property
    def plain_s(self) -> float:
        return float(self.step_s(np.zeros(1))[0])

    def outcome(self, asked: Sequence[StaticRequest]) -> LongRunOutcome:
        """Return the outcome of these windows with the shortest consistent step; in longer ones more nodes arrive."""
        k, depth = np.array([one.k for one in asked]), np.array([one.depth for one in asked])
        low, high = self.plain_s, float(self.step_s(self._most())[0])
        for _ in range(NARROWER):
            lengths = np.linspace(low, high, LENGTHS)
            tokens, nodes = per_step(self.sessions, k, depth, lengths[:, None])
            first = int(np.argmax(self.step_s(nodes.sum(axis=1)) <= lengths))
            low, high = lengths[max(0, first - 1)], lengths[first]
        return LongRunOutcome(float(high), tuple(tokens[first].tolist()))

    def best(self, tolerance: float) -> LongRunOutcome:
        """Return the best outcome of any windows.

        tolerance: by which share of streaming's speed anybody may be slower; 1 asks for goodput alone.
        """
        most = self._most()[0]
        found = self._best_of(np.append(0.0, _between(FEWEST, most, FACTORS[0])), tolerance)
        for wider, factor in itertools.pairwise(FACTORS):
            near = max(FEWEST, max(found, key=_goodput).nodes)
            found += self._best_of(_between(max(FEWEST, near / wider), min(near * wider, most), factor), tolerance)
        return max(found, key=_goodput)

    def _most(self) -> Floats:
        return np.array([sum(LEVELS[-1] * one.nodes_per_level for one in self.sessions)])

    def _best_of(self, totals: Floats, tolerance: float) -> list[LongRunOutcome]:
        """Return the best outcome for each total of nodes, from the least, as long as any division of them is fair."""
        lengths = self.step_s(totals)
        tokens, nodes = per_step(self.sessions, LEVELS[:, None], np.array(ENDLESS), lengths[:, None, None])
        found = []
        for i, length in enumerate(lengths):
            best = divided(tokens[i].T, nodes[i].T, totals[i], (1.0 - tolerance) * length / self.plain_s)
            if best is None:
                break  # a longer step would ask still more of everybody
            found.append(LongRunOutcome(float(length), tuple(best.tolist()), float(totals[i])))
        return found


def _goodput(outcome: LongRunOutcome) -> float:
    return outcome.goodput


def _between(low: float, high: float, factor: float) -> Floats:
    """Return values from low to high, each greater than the last by no more than this factor."""
    found: Floats = np.geomspace(low, high, 2 + int(np.log(high / low) / np.log(factor)))
    return found


def divided(tokens: Floats, nodes: Floats, total: float, least: float) -> Floats | None:
    """Return tokens per step `[sessions]` if each divides its time so that their sum is greatest; None if none is fair.

    tokens, nodes: `[sessions, windows]`, per step. total: nodes that the step holds. least: tokens for everybody.

    Of a session's windows those on the upper hull of (nodes, tokens) count, one mixed with the next. One more node
    brings less and less along a hull. So everybody gets what it needs first, and then the nodes that are left go to
    where they bring most: the optimum of the linear program, whose only bound that sessions share is the total.
    """
    rows = np.arange(len(tokens))
    here = np.where(nodes == nodes.min(axis=1, keepdims=True), tokens, -np.inf).argmax(axis=1)
    reached, used = tokens[rows, here], nodes[rows, here].sum()
    each_rise: list[Floats] = []  # along the hulls, as `each_run`: `[edges, sessions]`; 0 behind a hull's end
    each_run: list[Floats] = []
    while True:
        rise, run = tokens - tokens[rows, here][:, None], nodes - nodes[rows, here][:, None]
        steepness = np.where((rise > 0.0) & (run > 0.0), rise / np.where(run > 0.0, run, 1.0), 0.0)
        there = steepness.argmax(axis=1)
        goes_on = steepness[rows, there] > 0.0
        if not goes_on.any():
            break
        each_rise.append(rise[rows, there] * goes_on)
        each_run.append(run[rows, there] * goes_on)
        here = np.where(goes_on, there, here)
    rises, runs = np.array(each_rise).reshape(-1, len(rows)), np.array(each_run).reshape(-1, len(rows))
    needed = np.maximum(0.0, least - reached)
    forced = np.clip(needed - (rises.cumsum(axis=0) - rises), 0.0, rises)
    slopes = rises / np.where(runs > 0.0, runs, 1.0)
    used += (forced / np.where(slopes > 0.0, slopes, 1.0)).sum()
    if (needed - forced.sum(axis=0) > _NOTHING).any() or used > total + _NOTHING:
        return None
    order = np.argsort(-slopes, axis=None, kind="stable")
    room = (runs - forced / np.where(slopes > 0.0, slopes, 1.0)).ravel()[order]
    given = np.zeros(len(order))
    given[order] = np.clip(total - used - (room.cumsum() - room), 0.0, room)
    result: Floats = reached + forced.sum(axis=0) + (given.reshape(slopes.shape) * slopes).sum(axis=0)
    return result


def per_step(sessions: Sequence[SessionTruth], k: Ints, depth: Ints, step_s: Floats) -> tuple[Floats, Floats]:
    """Return (tokens, nodes) per step `[..., sessions]` in the long run. Windows and lengths broadcast to that shape.

    Nodes are what a step holds, those below a rejected node too: the device knows no better when it sends them.
    """
    rtt = np.array([one.rtt_s for one in sessions]) / step_s
    rtt, k, depth = np.broadcast_arrays(rtt, k, np.maximum(depth, 1))
    draft = np.broadcast_to(np.array([one.draft_s for one in sessions]) / step_s, rtt.shape)
    tokens, levels = np.ones(rtt.shape), np.zeros(rtt.shape)
    for process in {one.process for one in sessions}:
        mine = [i for i, one in enumerate(sessions) if one.process == process]
        shape = rtt[..., mine].shape
        times: list[Floats] = [each[..., mine].ravel() for each in (rtt, draft)]
        windows: list[Ints] = [each[..., mine].ravel() for each in (k, depth)]
        run = _Run.of(times[0], times[1], windows[0], windows[1], positions=_ends(process).shape[1])
        tokens[..., mine], levels[..., mine] = (each.reshape(shape) for each in run.per_step(process))
    return tokens, levels * np.array([one.nodes_per_level for one in sessions])


@dataclass(frozen=True)
class _Run:
    """Follow a device from a fresh start as long as its draft tokens are accepted. All arrays are `[positions, n]`."""

    step: Floats
    """Step in which a position is committed, from 0."""
    drafted_in_time: Bools
    """Whether its node arrives before the step begins and is among the step's k."""
    levels: Floats
    """Proposed levels in all steps up to that one."""

    @classmethod
    def of(cls, rtt: Floats, draft: Floats, k: Ints, depth: Ints, positions: int) -> _Run:
        """Simulate a run. The token before it is committed when step 0 begins; the device receives it rtt/2 later.

        The next node is begun when the last is drafted or its token known, whichever is first, and no sooner than the
        token `depth` before it is known.
        """
        shape = (positions, len(k))
        step, drafted_in_time, known = np.empty(shape), np.empty(shape, bool), np.empty(shape)
        drafted, before = np.full(len(k), np.inf), rtt / 2.0
        now, taken = np.zeros(len(k)), np.zeros(len(k))
        shallow = np.flatnonzero(depth < positions)
        for position in range(positions):
            begun = np.minimum(drafted, before)
            late = shallow[depth[shallow] <= position]
            begun[late] = np.maximum(begun[late], known[position - depth[late], late])
            drafted = begun + draft
            step[position] = now
            there = drafted_in_time[position] = (drafted + rtt / 2.0 <= now + 1e-9) & (taken < k)
            known[position] = before = now + 1.0 + rtt / 2.0
            taken = (taken + 1.0) * there
            now = now + ~there
        return cls(step, drafted_in_time, _levels(drafted_in_time))

    def per_step(self, process: AcceptanceProcess) -> tuple[Floats, Floats]:
        """Return (tokens, levels) `[n]`: the yield up to each position, weighted by the runs that end there."""
        ends = _ends(process)
        chance = ends.sum(axis=2)
        # A right sibling takes one token of the target's own with it, and nothing was drafted below it.
        more = process.caught * self.drafted_in_time
        turned = ends @ _flip(process) - ends
        tokens = (chance @ np.arange(1.0, len(self.step) + 1.0))[:, None] + chance @ more
        crossed = [ends[m, :, 1 - m].sum() + turned[m, :, 1 - m] @ more for m in (0, 1)]
        begins = np.stack([crossed[1], crossed[0]]) + 1e-15  # in easy, in hard text: as often as runs lead there
        steps = (begins * (chance @ self.step + 1.0)).sum(axis=0)
        return (begins * tokens).sum(axis=0) / steps, (begins * (chance @ self.levels)).sum(axis=0) / steps


def _levels(drafted_in_time: Bools) -> Floats:
    """Sum up the levels. A step's last position has no node; its levels are those of every position in it."""
    so_far = drafted_in_time.cumsum(axis=0, dtype=np.float64)
    so_far[:-1][drafted_in_time[:-1]] = np.inf  # as many as at the next position that has no node
    levels: Floats = np.minimum.accumulate(so_far[::-1], axis=0)[::-1]
    return levels


def _flip(process: AcceptanceProcess) -> Floats:
    return np.array([[1.0 - process.flip, process.flip], [process.flip, 1.0 - process.flip]])


@functools.lru_cache(maxsize=64)
def _ends(process: AcceptanceProcess) -> Floats:
    """Return the chance `[state before, position, state there]` that a run's first rejection is at this position."""
    right = np.array([process.easy, process.hard])
    lives, ends = np.eye(2), []
    while len(ends) < HORIZON and lives.sum(axis=1).max() > RARE:
        there = lives @ _flip(process)
        ends.append(there * (1.0 - right))
        lives = there * right
    ends[-1] += lives
    below = min(int(LEVELS[-1]), HORIZON - len(ends))  # a step holds levels below the one where a run ends, too
    return np.stack([*ends, *np.zeros((below, 2, 2))], axis=1)
