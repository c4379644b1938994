"""Whether co-located drafting pays at present, by what it took and brought: a pause where it does not, then a trial.

It pays where a step with it commits more per second than one without,

    (sessions + gain * thin) / (step with the nodes + drafting) > sessions / plain step,

gain being the accepted nodes per session drafted for (thin). What is judged is going on with it: the reading of prompts
and of what came in a pause counts for nothing, or a pause would make its own end unlikely.
"""

from __future__ import annotations

import numpy as np

from cloud_verifier.engine.ordering import Cost
from cloud_verifier.engine.stats import MovingAverage
from outrider.core.step_cost import StepCost

TRIAL = 8
"""Steps with drafting before it is judged."""
FIRST_PAUSE, LONGEST_PAUSE = 64, 1024
"""Steps; each pause is twice the one before until drafting has paid again."""


class Payoff:
    """Learns from every step with drafting. Not thread-safe."""

    def __init__(self) -> None:
        self._gain = MovingAverage()
        self._nodes = MovingAverage()
        self._drafting: StepCost | None = None
        """Seconds by sessions drafted for."""
        self._judged = 0
        self._pause = FIRST_PAUSE
        self._resumes = 0
        """The step that ends the pause."""
        self._failed_at = 0
        """Sessions drafted for when it last did not pay."""

    def pays(self, step: int, sessions: int, thin: int, cost: Cost) -> bool:
        """Whether to draft in this step. thin: those of the sessions that would be drafted for.

        cost: of the step by nodes. A pause also ends when there are half as many to draft for: fewer sessions leave
        the target more idle.
        """
        if step < self._resumes and 2 * thin > self._failed_at:
            return False
        if self._drafting is None or self._judged < TRIAL:
            return True
        plain, filled = cost(np.array([0, round(self._nodes.value * thin)]))
        drafted = float(filled) + self._drafting.seconds(thin, 0)
        if (sessions + self._gain.value * thin) / drafted > sessions / float(plain):
            self._pause = FIRST_PAUSE
            return True
        self._resumes, self._failed_at = step + self._pause, thin
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._judged, self._gain, self._nodes = 0, MovingAverage(), MovingAverage()
        return False

    def took(self, thin: int, seconds: float) -> None:
        """Drafting for so many, none of which had more to read than a step's tokens."""
        seconds = max(seconds, 1e-6)
        if self._drafting is None:
            self._drafting = StepCost({thin: seconds})
        self._drafting.observe(thin, 0, seconds)

    def brought(self, thin: int, nodes: int, accepted: int) -> None:
        """What came of a step with drafting for so many sessions: nodes evaluated, and accepted."""
        self._gain.add(accepted / thin)
        self._nodes.add(nodes / thin)
        self._judged += 1
