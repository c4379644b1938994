"""Whether co-located drafting pays at present, by what it took and brought: a pause where it does not, then a trial.

It pays where a step with it commits more per second than one without,

    (commits + gain * thin) / (step with the nodes + drafting) > commits / plain step,

gain being the accepted nodes per session drafted for (thin), and commits what the step brings beside them. Reading a
prompt, or what came in a pause, is no part of going on with it; it is an outlay, and is held against what drafting can
bring for that session until it ends.
"""

from __future__ import annotations

import numpy as np

from cloud_verifier.engine.row_allocation import CostCurve
from cloud_verifier.engine.stats import MovingAverage
from outrider.core.step_cost import StepCost

TRIAL = 8
"""Steps with drafting before it is judged."""
FIRST_PAUSE, LONGEST_PAUSE = 64, 1024
"""Steps; each pause is twice the one before until drafting has paid again."""
HOPED = 1.0
"""Gain while none was seen."""


class Payoff:
    """Learns from every step with drafting. Not thread-safe."""

    def __init__(self) -> None:
        self._gain = MovingAverage()
        self._nodes = MovingAverage()
        self._read_s = MovingAverage()
        """Of the draft, for a token that it reads."""
        self._drafting: StepCost | None = None
        """Seconds by sessions drafted for."""
        self._judged = 0
        self._pause = FIRST_PAUSE
        self._resumes = 0
        """The step that ends the pause."""
        self._failed_at = 0
        """Sessions drafted for when it last did not pay."""

    def pays(self, step: int, commits: float, thin: int, cost: CostCurve) -> bool:
        """Whether to draft in this step. thin: sessions that would be drafted for. cost: of the step by their nodes.

        A pause also ends when there are half as many to draft for: fewer sessions leave the target more idle.
        """
        if step < self._resumes:
            if 2 * thin > self._failed_at:
                return False
            # Another matter than what failed: it is tried afresh, and should that fail, not given up for long at once.
            self._resumes, self._pause = step, FIRST_PAUSE
        if self.on_trial:
            return True
        if self._value_s(commits, thin, cost) > 0.0:
            self._pause = FIRST_PAUSE
            return True
        self._resumes, self._failed_at = step + self._pause, thin
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._judged, self._gain, self._nodes = 0, MovingAverage(), MovingAverage()
        return False

    def worth_reading(self, tokens: int, left: int, commits: float, thin: int, cost: CostCurve) -> bool:
        """Whether drafting for a session can bring back what reading so many tokens of it takes.

        left: tokens that it may still generate.
        """
        steps = left / (1.0 + self._expected_gain)
        return self._read_s.value * tokens < steps * self._value_s(commits, thin, cost) / thin

    @property
    def on_trial(self) -> bool:
        """Whether too little was seen since the last pause to judge."""
        return self._judged < TRIAL

    @property
    def _expected_gain(self) -> float:
        return self._gain.value if self._judged else HOPED

    def _value_s(self, commits: float, thin: int, cost: CostCurve) -> float:
        """Seconds that a step with drafting saves: what its gain takes by plain steps, less what it costs."""
        plain, filled = map(float, cost(np.array([0, round(self._nodes.value * thin)])))
        drafting = self._drafting.seconds(thin, 0) if self._drafting else 0.0
        return self._expected_gain * thin * plain / commits - (filled - plain) - drafting

    def took(self, thin: int, seconds: float) -> None:
        """Drafting for so many, the reading of prompts left out."""
        seconds = max(seconds, 1e-6)
        if self._drafting is None:
            self._drafting = StepCost({thin: seconds})
        self._drafting.observe(thin, 0, seconds)

    def read(self, tokens: int, seconds: float) -> None:
        """So many tokens, most of them of prompts, in so long."""
        self._read_s.add(seconds / tokens)

    def brought(self, thin: int, nodes: int, accepted: int) -> None:
        """What came of a step with drafting for so many sessions: nodes evaluated, and accepted."""
        self._gain.add(accepted / thin)
        self._nodes.add(nodes / thin)
        self._judged += 1
