"""Decide whether a source of nodes pays, by what it took and gained: a pause when it does not, then a trial.

It pays if a step with it commits more per second than one without,

    (commits + gain * sessions) / (step with the nodes + drafting) > commits / plain step,

with gain the accepted nodes per session drafted for that would not have been reached without it, and commits what the
step commits beside them. The time to read a
prompt, or the tokens of a pause, does not count as drafting: it is weighed against what drafting can gain for that
session until it ends.
"""

from __future__ import annotations

import math

import numpy as np

from cloud_verifier.engine.row_allocation import CostCurve
from cloud_verifier.engine.stats import MovingAverage
from outrider.core.step_cost import StepCost

TRIAL = 8
"""Number of steps with drafting before it is judged."""
TRIAL_SESSIONS = 8
"""The most sessions that are drafted for in a step of a trial: what it gains is per session."""
SHORT_TRIAL, MOST_GAIN = 3, 8.0
"""Steps after which a trial may end early: if even the shortest drafting took more than this gain per session would be
worth, or if the sessions of these steps were enough to tell that drafting does not pay."""
ENOUGH_SESSIONS = 2 * TRIAL_SESSIONS
"""Gains of sessions, over the steps of a trial, from which that can be told."""
FIRST_PAUSE, LONGEST_PAUSE = 64, 1024
"""Number of steps; each is twice as long as the last one with about as many sessions, until drafting has paid again."""
REMEMBERED = 40
"""Number of steps whose plain mean would be as exact as the moving average of gains."""
INITIAL_GAIN = 1.0
"""Gain that is assumed before any was measured."""


class DraftingTime:
    """The seconds that a source takes. Not thread-safe."""

    def __init__(self) -> None:
        self._drafting: StepCost | None = None
        self._read_s = MovingAverage()

    @property
    def read_s(self) -> float:
        """Return the mean seconds in which the source reads a token."""
        return self._read_s.value

    def seconds(self, sessions: int) -> float:
        """Return the expected seconds of drafting for so many sessions; 0 before the first."""
        return self._drafting.seconds(sessions, 0) if self._drafting else 0.0

    def observe_drafting(self, sessions: int, seconds: float) -> None:
        """Learn the time of drafting for so many sessions, without reading prompts."""
        seconds = max(seconds, 1e-6)
        if self._drafting is None:
            self._drafting = StepCost({sessions: seconds})
        self._drafting.observe(sessions, 0, seconds)

    def observe_reading(self, tokens: int, seconds: float) -> None:
        """Learn the time in which the source read so many tokens, most of them of prompts."""
        self._read_s.add(seconds / tokens)


class DraftPolicy:
    """Decides whether to draft, and learns from every step with drafting. Not thread-safe.

    time: what drafting takes, which the caller has learn; policies of one source may share it.
    """

    def __init__(self, time: DraftingTime | None = None) -> None:
        self.time = time or DraftingTime()
        self._gain = MovingAverage()
        self._squares = MovingAverage()
        """Of gains, whose variance tells how far their mean may be from what it would be after many steps."""
        self._nodes = MovingAverage()
        self._shortest_s = math.inf
        """Seconds of the shortest drafting for a session since the last pause."""
        self._judged = 0
        self._sessions = 0
        """Number of gains of sessions since the trial began, over all steps."""
        self._pauses: dict[int, int] = {}
        """Bits of the number of sessions -> steps of the next pause."""
        self._resumes = 0
        """Number of the step that ends the pause."""
        self.paused = False
        """Whether it did not pay, when that was last asked."""
        self._failed_at = 0
        """Number of sessions drafted for when drafting last did not pay."""

    def pays(self, step: int, commits: float, sessions: int, cost: CostCurve) -> bool:
        """Return whether to draft in this step, for so many sessions. cost: of the step by its nodes.

        A pause also ends when there are half as many to draft for: with fewer sessions the target has more time left.
        """
        if step < self._resumes:
            if 2 * sessions > self._failed_at:
                return False
            self._resumes = step  # not the case that failed
        self.paused = False
        drafting_s = self.time.seconds(sessions)
        if self.on_trial:
            drafting_s = min(drafting_s, self._shortest_s * sessions)  # the first one may have had to load something
            worth_s = MOST_GAIN * float(cost(np.array([0]))[0]) / commits
            open_yet = self._sessions < ENOUGH_SESSIONS or self._may_save(commits, sessions, cost, drafting_s)
            if self._judged < SHORT_TRIAL or (self._shortest_s < worth_s and open_yet):
                return True
        elif self._may_save(commits, sessions, cost, drafting_s):
            self._pauses.pop(sessions.bit_length(), None)
            return True
        pause = self._pauses.get(sessions.bit_length(), FIRST_PAUSE)
        self._pauses[sessions.bit_length()] = min(2 * pause, LONGEST_PAUSE)
        self._resumes, self._failed_at = step + pause, sessions
        self.judge_anew()
        self.paused = True
        return False

    def pauses_in(self, step: int) -> bool:
        """Return whether this step is in a pause."""
        return step < self._resumes

    def judge_anew(self) -> None:
        """Forget what was gained: what it gains has become another, and a trial shows what."""
        self._gain, self._nodes, self._squares = MovingAverage(), MovingAverage(), MovingAverage()
        self._judged, self._sessions = 0, 0
        self._shortest_s = math.inf

    def reading_pays(self, tokens: int, left: int, commits: float, sessions: int, cost: CostCurve) -> bool:
        """Return whether drafting for a session can regain the time to read so many tokens of it.

        left: tokens that it may still generate. sessions: that would be drafted for.
        """
        steps = left / (1.0 + self._expected_gain)
        saved_s = self._saved_s(commits, sessions, cost, self._expected_gain) - self.time.seconds(sessions)
        return self.time.read_s * tokens < steps * saved_s / sessions

    @property
    def on_trial(self) -> bool:
        """Return whether there were too few steps since the last pause to judge."""
        return self._judged < TRIAL

    @property
    def expected_gain(self) -> float:
        """Return the tokens that it is expected to add to the next step of a session: none while it is paused."""
        return 0.0 if self.paused else self._expected_gain

    @property
    def _expected_gain(self) -> float:
        return self._gain.value if self._judged else INITIAL_GAIN

    @property
    def _gain_error(self) -> float:
        """Return the standard error of the mean gain: of few steps, or uneven ones, a source may only look useless."""
        variance = max(0.0, self._squares.value - self._gain.value**2)
        return math.sqrt(variance / max(1, min(self._judged, REMEMBERED) - 1))

    def _may_save(self, commits: float, sessions: int, cost: CostCurve, drafting_s: float) -> bool:
        """Return whether nodes may save more seconds than drafting takes, as far as their gain is known."""
        return self._saved_s(commits, sessions, cost, self._expected_gain + self._gain_error) > drafting_s

    def _saved_s(self, commits: float, sessions: int, cost: CostCurve, gain: float) -> float:
        """Return the seconds that a step's nodes save: those of their gain by plain steps, less what they cost."""
        plain, filled = map(float, cost(np.array([0, round(self._nodes.value * sessions)])))
        return gain * sessions * plain / commits - (filled - plain)

    def observe_drafting(self, sessions: int, seconds: float) -> None:
        """Note, for a trial that may end early, that drafting for so many sessions took so long."""
        self._shortest_s = min(self._shortest_s, max(seconds, 1e-6) / sessions)

    def observe_step(self, sessions: int, nodes: int, accepted: int) -> None:
        """Learn from a step with drafting for so many sessions: nodes evaluated, and nodes accepted."""
        self._gain.add(accepted / sessions)
        self._squares.add((accepted / sessions) ** 2)
        self._nodes.add(nodes / sessions)
        self._judged += 1
        self._sessions += sessions
