"""What the best decision for a verifier's sessions could bring: a yardstick that shares nothing with the controller.

It knows the truth where the controller has estimates: the process that each session's verdicts are drawn from, round
trip, drafting time and the cost of a step. It does not know the future: neither which guess will be right nor whether
a text is in an easy or in a hard stretch now, so a window is judged by the process's long run. The controller sees some
hundred verdicts, about five stretches, and decides for seconds, about as many: a stretch is no news to either.

Expected tokens are found without replaying anything. After a wrong guess a device starts afresh from the target's
token, and until the next one everything is determined: which guess arrives before which step hangs on the times alone.
So the protocol is a renewal process whose runs are weighed by the chance that they end at each position
(Smith, Regenerative Stochastic Processes, 1955), with two states, since stretches outlast runs.

The optimum is a linear program (HiGHS) for each length of the step: every session divides its time between windows,
so that the nodes fit into the step and everybody keeps the speed that the controller has to promise. Fractions are
allowed and run-ahead costs nothing, which no controller has: what it finds is a bound, but for the grid of lengths,
which is `FINE` apart around the best.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csr_array, kron, vstack

HORIZON = 144
"""Positions of a run; one that is still unbroken then counts as broken (3e-8 of the runs of the best text here)."""
LEVELS = tuple(range(17))
"""Levels per step that a session may ask for."""
ENDLESS = 1 << 20
"""Run-ahead that never holds a device back."""
COARSE, FINE = 1.3, 1.01
"""Factors between the totals of nodes that are tried, first and around the best."""
SETTLED = 1e-9
"""Relative; the step's length of given windows is found by bisection to this."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Process:
    """Verdicts of a draft on a kind of text: two states, each with its chance that the first guess is right."""

    easy: float
    hard: float
    flip: float
    """Chance per token that the state changes."""
    caught: float
    """Of misses, by a sibling."""


@dataclass(frozen=True)
class Truth:
    """One session as it is."""

    process: Process
    rtt_s: float
    draft_s: float
    nodes_per_level: float


@dataclass(frozen=True)
class Asked:
    """A window: levels per step and how far the device runs ahead."""

    k: int
    depth: int = ENDLESS


@dataclass(frozen=True)
class Outcome:
    """What a verifier delivers in the long run."""

    step_s: float
    tokens: tuple[float, ...] = field(repr=False)
    """Per step, of each session."""

    @property
    def goodput(self) -> float:
        return sum(self.tokens) / self.step_s

    def over_streaming(self, plain_s: float) -> list[float]:
        """Each session's speed over what it would be if all streamed, in steps of plain_s."""
        return [tokens * plain_s / self.step_s for tokens in self.tokens]


@dataclass(frozen=True)
class Verifier:
    """Its sessions and what its steps cost."""

    sessions: tuple[Truth, ...]
    step_s: Callable[[Floats], Floats]
    """Nodes of all sessions together, their last committed tokens not among them -> seconds; never falling."""

    @property
    def plain_s(self) -> float:
        return float(self.step_s(np.zeros(1))[0])

    def outcome(self, asked: Sequence[Asked]) -> Outcome:
        """Of these windows, the step as long as all of them make it."""
        low, high = self.plain_s, float(self.step_s(self._most())[0])
        while high - low > SETTLED * high:
            middle = (low + high) / 2.0
            _, nodes = self._each(asked, middle)
            low, high = (middle, high) if float(self.step_s(nodes.sum(keepdims=True))[0]) > middle else (low, middle)
        return Outcome(high, tuple(self._each(asked, high)[0].tolist()))

    def best(self, tolerance: float) -> Outcome:
        """The most that any windows bring if nobody is slower than streaming by more than this share; 1: whoever pays.

        It may be as slow as streaming, which always is among the possible.
        """
        totals = np.append(0.0, np.geomspace(1.0, self._most()[0], _steps(self._most()[0], COARSE)))
        found = self._best_of(totals, tolerance)
        near = int(np.argmax([one.goodput for one in found]))
        low, high = max(1.0, totals[max(0, near - 1)]), totals[min(near + 1, len(totals) - 1)]
        finer = self._best_of(np.geomspace(low, high, _steps(high / low, FINE)), tolerance)
        return max([*found, *finer], key=lambda one: one.goodput)

    def _most(self) -> Floats:
        return np.array([sum(LEVELS[-1] * one.nodes_per_level for one in self.sessions)])

    def _each(self, asked: Sequence[Asked], step_s: float) -> tuple[Floats, Floats]:
        tokens, nodes = per_step([*self.sessions], [*asked], np.full(len(asked), step_s))
        return tokens, nodes

    def _best_of(self, totals: Floats, tolerance: float) -> list[Outcome]:
        """For each total of nodes, as long as any division of them is fair; none may be, but for a total of 0."""
        lengths = self.step_s(totals)
        shape = (len(totals), len(self.sessions), len(LEVELS))
        sessions = [one for _ in totals for one in self.sessions for _ in LEVELS]
        asked = [Asked(k) for _ in totals for _ in self.sessions for k in LEVELS]
        tokens, nodes = per_step(sessions, asked, np.repeat(lengths, shape[1] * shape[2]))
        found = []
        for i, length in enumerate(lengths):
            least = (1.0 - tolerance) * length / self.plain_s
            best = divided(tokens.reshape(shape)[i], nodes.reshape(shape)[i], totals[i], least)
            if best is None:
                break  # a longer step would ask still more of everybody
            found.append(Outcome(float(length), tuple(best.tolist())))
        return found


def _steps(ratio: float, factor: float) -> int:
    return 2 + int(np.log(max(1.0, ratio)) / np.log(factor))


def divided(tokens: Floats, nodes: Floats, total: float, least: float) -> Floats | None:
    """Tokens per step `[sessions]` when each divides its time so that their sum is greatest; None if none is fair.

    tokens, nodes: `[sessions, windows]`, per step. total: nodes that the step holds. least: tokens for everybody.
    """
    count, windows = tokens.shape
    one = kron(csr_array(np.eye(count)), np.ones((1, windows)), format="csr")
    each = csr_array((tokens.ravel(), (np.repeat(np.arange(count), windows), np.arange(tokens.size))))
    found = linprog(
        -tokens.ravel(),
        A_ub=vstack([csr_array(nodes.reshape(1, -1)), -each]),
        b_ub=np.append(total, np.full(count, -least)),
        A_eq=one,
        b_eq=np.ones(count),
        method="highs",
    )
    if found.status == 2:
        return None
    if found.x is None:
        raise RuntimeError(f"HiGHS found no optimum for {count} sessions: {found.message}")
    shares: Floats = found.x.reshape(count, windows)
    result: Floats = (shares * tokens).sum(axis=1)
    return result


def per_step(sessions: Sequence[Truth], asked: Sequence[Asked], step_s: Floats) -> tuple[Floats, Floats]:
    """(tokens, nodes) per step `[n]` in the long run, of n sessions with these windows in steps of these lengths `[n]`.

    Nodes are what a step holds, those below a wrong guess too: the device knows no better when it sends them.
    """
    rtt = np.array([one.rtt_s for one in sessions]) / step_s
    draft = np.array([one.draft_s for one in sessions]) / step_s
    k = np.array([one.k for one in asked])
    run = _Run.of(rtt, draft, k, np.array([one.depth for one in asked]))
    tokens, levels = np.ones(len(k)), np.zeros(len(k))
    for process in {one.process for one in sessions}:
        mine = np.array([one.process == process for one in sessions])
        tokens[mine], levels[mine] = run.of_those(mine).per_step(process)
    return tokens, levels * np.array([one.nodes_per_level for one in sessions])


@dataclass(frozen=True)
class _Run:
    """From where a device starts afresh: what happens as long as its guesses are right. All `[HORIZON, n]`."""

    step: Ints
    """In which step a position is committed, from 0."""
    guessed: NDArray[np.bool_]
    """Whether its guess is there when the step begins, and among the step's k."""
    levels: Ints
    """Guesses in all steps up to that one."""

    @classmethod
    def of(cls, rtt: Floats, draft: Floats, k: Ints, depth: Ints) -> _Run:
        """In steps. The token before the run was committed when step 0 begins, and the device hears of it rtt/2 later.

        The next guess is begun when the last is drafted or its token known, whichever is first, and no sooner than the
        token `depth` before it is known.
        """
        count = len(k)
        step, guessed = np.zeros((HORIZON, count), np.int64), np.zeros((HORIZON, count), bool)
        known = np.zeros((HORIZON, count))
        drafted, before = np.full(count, np.inf), rtt / 2.0
        now, taken = np.zeros(count, np.int64), np.zeros(count, np.int64)
        shallow = np.flatnonzero(depth < HORIZON)
        for position in range(HORIZON):
            begun = np.minimum(drafted, before)
            late = shallow[depth[shallow] <= position]
            begun[late] = np.maximum(begun[late], known[position - depth[late], late])
            drafted = begun + draft
            step[position] = now
            guessed[position] = (drafted + rtt / 2.0 <= now + 1e-9) & (taken < k)
            known[position] = before = now + 1.0 + rtt / 2.0
            taken = np.where(guessed[position], taken + 1, 0)
            now = now + ~guessed[position]
        return cls(step, guessed, _levels(guessed))

    def of_those(self, mine: NDArray[np.bool_]) -> _Run:
        return _Run(self.step[:, mine], self.guessed[:, mine], self.levels[:, mine])

    def per_step(self, process: Process) -> tuple[Floats, Floats]:
        """(tokens, levels) `[n]`: runs that end at a position, times what they bring up to there."""
        ends = _ends(process)
        chance = ends.sum(axis=2)
        # A right sibling takes one token of the target's own with it, and nothing was drafted below it.
        more = process.caught * self.guessed
        tokens = chance @ (np.arange(1, HORIZON + 1)[:, None] + more)
        steps = chance @ (self.step + 1)
        turned = ends @ _flip(process) - ends
        crossed = [(ends[m, :, 1 - m] @ np.ones_like(more)) + turned[m, :, 1 - m] @ more for m in (0, 1)]
        begins = np.stack([crossed[1], crossed[0]]) + 1e-15  # in easy, in hard text: as often as runs lead there
        per_steps = (begins * steps).sum(axis=0)
        tokens_each: Floats = (begins * tokens).sum(axis=0) / per_steps
        levels: Floats = (begins * (chance @ self.levels)).sum(axis=0) / per_steps
        return tokens_each, levels


def _levels(guessed: NDArray[np.bool_]) -> Ints:
    """A step's last position is the one that was not guessed; its levels are those of every position in it."""
    so_far = np.cumsum(guessed, axis=0)
    for position in range(HORIZON - 2, -1, -1):
        so_far[position] = np.where(guessed[position], so_far[position + 1], so_far[position])
    return so_far


def _flip(process: Process) -> Floats:
    return np.array([[1.0 - process.flip, process.flip], [process.flip, 1.0 - process.flip]])


def _ends(process: Process) -> Floats:
    """Chance `[state before, position, state there]` that a run's first wrong guess is at this position."""
    right = np.array([process.easy, process.hard])
    lives = np.eye(2)
    ends = np.zeros((2, HORIZON, 2))
    for position in range(HORIZON):
        there = lives @ _flip(process)
        ends[:, position] = there * (1.0 - right)
        lives = there * right
    ends[:, -1] += lives
    return ends
