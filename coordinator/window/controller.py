"""Decide how far each session of a verifier speculates: a frozen snapshot in, a decision per session out.

The goal is the verifier's goodput, subject to every session being at least as fast as if all sessions streamed
plainly. What a window brings a session is predicted by replaying its acceptance history (replay_tables.py); which
windows go together is searched for over all sessions at once (window_search.py). There is no state and no clock.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coordinator.records import Window, WindowBounds, WindowDecision
from coordinator.window.replay_tables import LONGEST, RunTables, replay_all
from coordinator.window.window_search import OptionTables
from outrider.core.acceptance.history import HIT
from outrider.core.step_cost import StepCost
from outrider.core.telemetry import SessionTelemetry

K = (1, 2, 3, 4, 6, 8, 12, 16)
"""Speculation lengths that are considered beside 0."""
MAX_DEPTH = 32
"""Window depth of a session without bounds."""
TOLERANCE = 0.02
"""Share by which a session may be slower than streaming: predictions are no better, and nodes are never quite free."""
STICK = 0.03
"""A session keeps its window unless another one is better by this share of its tokens per step."""
FAILED = 0.1
"""First acceptance below which a draft is no longer of use."""
ROUNDS = 3
"""Windows depend on the step's length and it on them; they settle after two rounds."""
SETTLED = 0.02
"""Share of a step by which another round may still change it."""
SPARE = 2
"""Levels that a device runs further ahead than is needed on average: too far costs little, too short idles the link."""
MOST_PER_LEVEL = 4
"""Nodes of a level, its siblings included, up to which the cost of a step is tabulated."""
NEAR = 0.4
"""Longest draft wait that is considered, in steps."""
SLACK = 2.0
"""Draft wait over the time in which nodes are expected: round trips vary, and nodes that arrive end the wait."""
STREAMING = Window(0, 0, 0.0, 1.0)
WIDEST = WindowBounds(Window(K[-1], MAX_DEPTH))
TABLES = RunTables(K)


@dataclass(frozen=True)
class SessionView:
    """A session as the controller sees it."""

    telemetry: SessionTelemetry
    """As its verifier reports it. The acceptance history is cut to what decisions are made from, and begins with that
    of its workload key if the session is new; draft_ms is assumed where it is not known, and infinite if the device
    drafts nothing; nodes_per_level is at least 1."""
    current: Window | None = None
    """None for a new session."""
    bounds: WindowBounds = WIDEST
    fixed: tuple[float, float] | None = None
    """Tokens and nodes per step of a session of which too little is known to decide: it goes on so, fair or not."""

    @property
    def drafts(self) -> bool:
        return self.fixed is None and bool(self.telemetry.acceptance_history) and self.telemetry.draft_ms < math.inf

    @property
    def server_gain(self) -> float:
        """Tokens that the verifier's own nodes add to a step without the device's; rounded, for equal predictions."""
        return round(self.telemetry.server_gain, 1)

    @property
    def first_acceptance(self) -> float:
        """Share of the positions whose first proposal was accepted."""
        history = self.telemetry.acceptance_history
        return history.count(HIT) / max(1, len(history))


@dataclass(frozen=True)
class VerifierView:
    """A verifier and its live sessions, as the controller sees them."""

    cost: StepCost
    sessions: tuple[SessionView, ...]
    between_s: float = 0.0
    """Time between two steps."""
    step_now_s: float = 0.0
    """Length of a step as it was predicted last, or else as it is; 0 if not known. With it decisions settle at once if
    windows change little."""

    @functools.cached_property
    def _steps_s(self) -> NDArray[np.float64]:
        count = len(self.sessions)
        nodes = np.arange(count * K[-1] * MOST_PER_LEVEL + 1)
        return self.between_s + self.cost.curve(count + nodes, count)

    def step_s(self, nodes: ArrayLike) -> NDArray[np.float64]:
        """Return the seconds `[n]` of steps with every session and so many nodes `[n]`, which are averages."""
        count = np.asarray(nodes, dtype=np.float64)
        steps_s = self._steps_s
        below = np.minimum(count.astype(np.int64), len(steps_s) - 2)
        interpolated: NDArray[np.float64] = steps_s[below] + (count - below) * (steps_s[below + 1] - steps_s[below])
        return interpolated


def decide(view: VerifierView, tolerance: float = TOLERANCE) -> Mapping[str, WindowDecision]:
    """Return the window of each session by its id.

    tolerance: share by which a session may be slower than streaming; 1 asks for goodput alone.
    """
    if not view.sessions:
        return {}
    plain_s = float(view.step_s(0))
    step_s = view.step_now_s or plain_s
    options = Options(view.sessions)
    for _ in range(ROUNDS):
        options.predict(step_s)
        tables = OptionTables(options.tokens, options.nodes, options.given, view.step_s)
        # Given nodes are there in any case: no session shall be slower than if all others streamed plainly.
        least = (1.0 - tolerance) / float(view.step_s(tables.given_nodes))
        balance = tables.best(least)
        settled = abs(balance.step_s - step_s) < SETTLED * step_s
        step_s = balance.step_s
        if settled:
            break
    kept = tables.of(balance.min_acceptance, options.kept(balance.chosen, tables.gains(balance.min_acceptance)))
    if kept.slowest >= least:
        balance = tables.polished(kept, least, STICK)  # a kept window may leave more, or less, for the others
    min_acceptance = tables.node_min_acceptance(balance)
    predicted = zip(*(each.tolist() for each in options.of(balance.chosen)), strict=True)
    steps = f"step {1e3 * balance.step_s:.0f} ms ({1e3 * plain_s:.0f} plain)"
    return {
        session.telemetry.session_id: WindowDecision(
            session_id=session.telemetry.session_id,
            epoch=session.telemetry.epoch,
            window=window,
            min_acceptance=min_acceptance,
            speedup=tokens * plain_s / balance.step_s,
            tokens_per_step=tokens_per_step,
            reason=_reason(session, window.k, tokens_per_step, nodes, most, steps),
            rtt_ms=session.telemetry.rtt_ms,
            draft_ms=session.telemetry.draft_ms,
            observations=len(session.telemetry.acceptance_history),
            first_acceptance=session.first_acceptance,
            max_k=window.k,
            step_ms=1e3 * balance.step_s,
        )
        for session, window, (tokens, tokens_per_step, nodes, most) in zip(
            view.sessions, options.windows(balance.chosen), predicted, strict=True
        )
    }


class Options:
    """The windows that sessions may have and what each brings, `[sessions, options]`; streaming comes first."""

    def __init__(self, sessions: Sequence[SessionView]) -> None:
        self._sessions = sessions
        self._alone = len(sessions) == 1
        self._waits = (False, True) if self._alone else (False,)
        self._k = np.array([0, *(k for k in K for _ in self._waits)])
        self._gain = np.array([session.server_gain for session in sessions])
        self._histories = [session.telemetry.acceptance_history for session in sessions]
        self._times_ms = np.array([(session.telemetry.rtt_ms, session.telemetry.draft_ms) for session in sessions])
        self._times = np.full(self._times_ms.shape, np.nan)
        self._bounds = np.array([(session.bounds.window.k, session.bounds.window.depth) for session in sessions])
        self.given = np.array([session.fixed is not None or session.bounds.pinned for session in sessions])
        """`[sessions]`: whether a session has only its first option, fair or not."""
        drafts = np.array([session.drafts for session in sessions]) & ~self.given
        exists = drafts[:, None] & (self._k <= self._bounds.min(axis=1)[:, None])
        self._chooses = exists[:, 1:].any(axis=1)
        exists[:, 0] = True
        self._none = np.where(exists, 0.0, -math.inf)
        self.nodes, self.tokens_per_step = np.zeros((2, *exists.shape))
        """Tokens and nodes are per length of a step, on average. A step may have waited, which tokens per step leave
        out. Tokens are -inf where a session has fewer options."""
        self.tokens = self._none.copy()
        self.tokens[:, 0] = self.tokens_per_step[:, 0] = 1.0 + self._gain

    def predict(self, step_s: float) -> None:
        """Predict what each option brings. step_s: length of the steps that the sessions share."""
        self._step_ms = 1e3 * step_s
        # Only ratios to the step matter to a replay. Rounded, they are equal for many sessions, and from second to
        # second.
        times, before = _rounded(self._times_ms / self._step_ms), self._times
        self._times, (rtt, draft) = times, times.T
        answer = rtt + 2.0 * draft
        self._near = np.where(answer <= NEAR, np.minimum(SLACK * answer, NEAR), 0.0)
        # In a batch nothing is gained by waiting but where all have to wait: the others' step goes on, and to sit it
        # out would save one row. So the wait is granted there, and not counted on.
        self._wait = self._near[:, None] * [False, *self._waits * len(K)]
        self._ahead = np.ceil(rtt).astype(np.int64) + SPARE
        self._depth = np.minimum(self._k + self._ahead[:, None], self._bounds[:, 1:])
        self._replay(np.flatnonzero(self._chooses & (times != before).any(axis=1)))
        for row in np.flatnonzero(self.given).tolist():
            self._give(row)

    def of(self, chosen: NDArray[np.int64]) -> tuple[NDArray[np.float64], ...]:
        """Return tokens, tokens per step and nodes `[sessions]` of these options, and the most tokens of any window."""
        rows = np.arange(len(chosen))
        found = (each[rows, chosen] for each in (self.tokens, self.tokens_per_step, self.nodes))
        return (*found, self.tokens[:, 1:].max(axis=1))

    def windows(self, chosen: NDArray[np.int64]) -> list[Window]:
        """Return the windows of these options."""
        rows = np.arange(len(chosen))
        granted_ms = self._granted()[rows, chosen] * self._step_ms
        each = zip(self._sessions, self._k[chosen], self._depth[rows, chosen], granted_ms, strict=True)
        return [
            self._pinned(row)
            if session.bounds.pinned
            else Window(int(k), int(depth), float(wait_ms), session.telemetry.nodes_per_level)
            if k
            else STREAMING
            for row, (session, k, depth, wait_ms) in enumerate(each)
        ]

    def kept(self, best: NDArray[np.int64], gains: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return the options that are the sessions' present windows, unless the best is much better.

        Streaming takes the place of a draft that has failed in any case: it may be hardly better, where nodes cost next
        to nothing. gains: of all options.
        """
        rows = np.arange(len(best))
        present = [session.current or Window(-1) for session in self._sessions]
        k, waits = np.array([(window.k, bool(window.draft_wait_ms)) for window in present]).T
        failed = [bool(each) and each.count(HIT) < FAILED * len(each) for each in self._histories]
        enough = gains[rows, best] - STICK * self.tokens[rows, best]
        same = (self._k == k[:, None]) & ((self._granted() > 0.0) == waits[:, None]) & (gains >= enough[:, None])
        keeps = same.any(axis=1) & ((self._k[best] > 0) | ~np.array(failed))
        return np.where(keeps, same.argmax(axis=1), best)

    def _granted(self) -> NDArray[np.float64]:
        """Return the draft waits `[sessions, options]` that windows have, in steps.

        One is also granted where the verifier has nodes of its own: what these cost, and a wait may save, only its
        engine knows.
        """
        return np.where(self._alone & (self._gain == 0.0)[:, None], self._wait, (self._k > 0) * self._near[:, None])

    def _pinned(self, row: int) -> Window:
        window = self._sessions[row].bounds.window
        near_ms = float(self._near[row]) * self._step_ms
        return replace(window, draft_wait_ms=near_ms) if window.draft_wait_ms is None else window

    def _replay(self, rows: NDArray[np.int64]) -> None:
        """Fill in what windows bring these sessions."""
        tabled = np.array([len(self._histories[row]) <= LONGEST for row in rows], dtype=bool)
        tabled &= (self._gain[rows] == 0.0) & ~self._wait[rows].any(axis=1)
        if len(some := rows[tabled]):
            times = *self._times[some].T, self._ahead[some], self._depth[some, -1]
            steps, levels = TABLES.per_window([self._histories[row] for row in some], *times)
            steps, levels = (each.repeat(len(self._waits), axis=1) for each in (steps, levels))
            self._fill(some, slice(1, None), steps, steps, levels)
        if len(some := rows[~tabled]):
            times = self._times[some, :1], self._times[some, 1:]
            windows = self._k[1:], self._depth[some, 1:], self._wait[some, 1:]
            replayed = replay_all([self._histories[row] for row in some], *times, *windows, self._gain[some, None])
            self._fill(some, slice(1, None), *replayed)

    def _fill(
        self,
        rows: NDArray[np.int64],
        options: slice,
        lengths: NDArray[Any],
        steps: NDArray[np.int64],
        levels: NDArray[np.int64],
        per_level: float | None = None,
    ) -> None:
        """Fill in these options of these sessions, from replays `[rows, options]` of their histories."""
        count = np.array([[len(self._histories[row])] for row in rows])
        nodes = [[per_level or self._sessions[row].telemetry.nodes_per_level or 1.0] for row in rows]
        self.tokens[rows, options] = count / lengths + self._none[rows, options]
        self.nodes[rows, options] = levels / lengths * np.array(nodes)
        self.tokens_per_step[rows, options] = count / steps

    def _give(self, row: int) -> None:
        """Fill in the only option of a session, fair or not."""
        session = self._sessions[row]
        window, self.tokens[row, 0] = self._pinned(row), 1.0 + self._gain[row]
        if not session.bounds.pinned and session.fixed is not None:
            self.tokens[row, 0], self.nodes[row, 0] = session.fixed
            self.tokens_per_step[row, 0] = self.tokens[row, 0]
        elif session.drafts:
            wait, (rtt, draft) = (window.draft_wait_ms or 0.0) / self._step_ms, self._times[row].tolist()
            replayed = replay_all(
                [self._histories[row]], rtt, draft, window.k, window.depth, wait, float(self._gain[row])
            )
            self._fill(np.array([row]), slice(1), *replayed, window.nodes_per_level or 1.0)
        else:
            self.nodes[row, 0] = window.k * (window.nodes_per_level or 1.0)


def _rounded(ratios: NDArray[np.float64]) -> NDArray[np.float64]:
    rounded: NDArray[np.float64] = np.exp2(np.round(8.0 * np.log2(np.maximum(ratios, 1e-4))) / 8.0)
    return np.where(ratios > 1e-4, rounded, 0.0)


def _reason(session: SessionView, k: int, tokens_per_step: float, nodes: float, most: float, steps: str) -> str:
    if session.bounds.pinned:
        return "pinned by the operator"
    if not session.drafts:
        return "its device drafts nothing"
    if k == 0:
        tried = f"; the most that any window gives is {most:.2f} tokens a step" if most > 0.0 else ""
        return f"no window pays{tried}"
    return (
        f"{tokens_per_step:.2f} tokens a step for {nodes:.1f} nodes at RTT {session.telemetry.rtt_ms:.0f} ms, {steps}"
    )
