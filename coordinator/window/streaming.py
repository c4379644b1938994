"""The streaming model: how fast one session goes for a given window, by replaying how its draft did on its own text.

Matches are not independent of one another (a geometric law overstates how deep they run), so nothing is drawn: the
recorded verdicts are played once, as they came. With an unbroken spine of guesses and siblings beside it, all of the
protocol that matters for speed is when the guess for position p

    is drafted    F[p] = min(F[p-1] if the guess before was right, C[p-1]) + draft, not before C[p - depth]
    arrives       A[p] = F[p] + rtt / 2

and C[p], when the device hears the token of position p: a step that begins at T commits on while A[p] <= T and the
verdict is no miss, at most k guesses, then one token of the target's own; the device hears of it rtt / 2 after its end.
A sibling that was right is committed like a guess, but nothing was drafted below it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.core.acceptance.history import HIT, MISS, SIBLING

StepTime = Callable[[int], float]
"""Nodes of this session in a step -> its seconds, whatever else is in it."""


@dataclass(frozen=True)
class LinkTiming:
    """What lies between a device and its tokens, and is not for the controller to choose."""

    rtt_s: float
    draft_s: float
    """Of the device for one more level of its tree; infinite where it drafts nothing."""
    step_s: StepTime


@dataclass(frozen=True)
class Window:
    """What the controller chooses for one session."""

    depth: int
    """How many levels the device runs ahead of the last token that it knows."""
    k: int
    """Levels that one step verifies; 0 is plain streaming."""
    draft_wait_s: float = 0.0
    """How long the verifier waits for a guess before a plain step, where the device is near enough to use it."""
    nodes_per_level: float = 1.0
    """A level's guess and its siblings that go along."""


@dataclass(frozen=True)
class Speed:
    """Of a replay."""

    tokens: int
    steps: int
    nodes: float
    """That went through the target."""
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps


def replay(verdicts: Sequence[int], way: LinkTiming, window: Window) -> Speed:
    """One session from its first step to the end of the verdicts; its device starts to draft with the first step.

    verdicts: of consecutive positions, at least one.
    """
    device = _Device(verdicts, way, window)
    waits = window.draft_wait_s > 0.0 and way.rtt_s <= window.draft_wait_s
    now = nodes = 0.0
    position = steps = 0
    while position < len(verdicts):
        reached = position
        rows = 0.0
        if window.k:
            if waits:
                now = max(now, min(device.arrival(position), now + window.draft_wait_s))
            last = min(position + window.k, len(verdicts))
            while reached < last and verdicts[reached] != MISS and device.arrival(reached) <= now:
                reached += 1
            caught = reached > position and verdicts[reached - 1] == SIBLING
            rows = window.nodes_per_level * device.levels(position, reached - caught, now)
        now += way.step_s(round(rows))
        nodes += rows
        steps += 1
        position = min(reached + 1, len(verdicts))
        device.hear(position, now)
    return Speed(len(verdicts), steps, nodes, now)


class _Device:
    """When the guesses for each position reach the verifier."""

    def __init__(self, verdicts: Sequence[int], way: LinkTiming, window: Window) -> None:
        self._verdicts = verdicts
        self._way = way
        self._window = window
        self._half_s = way.rtt_s / 2.0
        self._heard: list[float] = []
        """C[p]"""
        self._arrivals: list[float] = []
        """A[p], as far as it hangs on nothing to come."""
        self._drafted = 0.0
        """F of the last one of them."""

    def arrival(self, position: int) -> float:
        """A[p]; infinite while it hangs on a token that has not been committed."""
        p = len(self._arrivals)
        if position != p:
            return self._arrivals[position] if position < p else math.inf
        known = self._time_of(p - 1)
        guessed = self._drafted if p and self._verdicts[p - 1] == HIT else math.inf
        begun = max(min(known, guessed), self._time_of(p - self._window.depth))
        if begun == math.inf:
            return math.inf
        self._drafted = begun + self._way.draft_s
        self._arrivals.append(self._drafted + self._half_s)
        return self._arrivals[p]

    def _time_of(self, position: int) -> float:
        """When it knows this token."""
        if position < 0:
            return 0.0
        return self._heard[position] if position < len(self._heard) else math.inf

    def levels(self, position: int, right: int, now: float) -> int:
        """That a step takes at this time: those before `right`, whose first guesses are right, the one after them, and
        what was drafted below that."""
        window = self._window
        if right == len(self._verdicts) or self.arrival(right) > now:
            return right - position
        beyond = (now - self.arrival(right)) / self._way.draft_s if self._way.draft_s else math.inf
        return int(min(window.k, window.depth, right - position + 1 + beyond))

    def hear(self, end: int, now: float) -> None:
        """All before `end` are committed now."""
        self._heard += [now + self._half_s] * (end - len(self._heard))
        while len(self._arrivals) < end and self.arrival(len(self._arrivals)) < math.inf:
            pass  # a guess that comes after its token still leads to those below it
