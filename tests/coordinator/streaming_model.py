"""Predict how fast one session goes with a given window, by replaying its acceptance history.

Matches are not independent of one another (a geometric law overstates how deep they run), so nothing is drawn: the
recorded outcomes are replayed once, in their order. With an unbroken spine of first proposals and siblings beside it,
all of the protocol that matters for speed is when the proposal for position p

    is drafted    F[p] = min(F[p-1] if the proposal before was accepted, C[p-1]) + draft, not before C[p - depth]
    arrives       A[p] = F[p] + rtt / 2

and C[p], when the token of position p reaches the device: a step that begins at T commits on while A[p] <= T and the
outcome is no miss, at most k proposals, then one token of the target's own, which reaches the device rtt / 2 after the
step's end. An accepted sibling is committed like a first proposal, but nothing was drafted below it.

The verifier's own nodes are there in every step, at any distance. What they add to a step without the device's is
measured, and one mean is enough: each step commits at least so many tokens more, whole ones as the mean adds up.

`coordinator.window.replay` predicts the same for all sessions and windows at once, as arrays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.core.acceptance.history import HIT, MISS, SIBLING
from outrider.wire.v1 import coordinator_pb2 as pb


@dataclass(frozen=True)
class LinkTiming:
    """The times of a session that the controller cannot choose."""

    rtt_s: float
    draft_s: float
    """Time of the device for one more level of its tree; infinite if it drafts nothing."""
    step_s: Callable[[int], float]
    """Nodes of this session in a step -> seconds of the step."""


@dataclass(frozen=True)
class Speed:
    """The tokens, steps, nodes and seconds of a replay."""

    tokens: int
    steps: int
    nodes: float
    """Nodes that went through the target."""
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def tokens_per_step(self) -> float:
        return self.tokens / self.steps


def replay(history: Sequence[int], timing: LinkTiming, window: pb.Window, server_gain: float = 0.0) -> Speed:
    """Replay one session from its first step to the end of its history; the device starts to draft with the first step.

    history: outcomes of consecutive positions (outrider.core.acceptance.history), at least one. server_gain: tokens
    that the verifier's own nodes add to a step without the device's, on average.
    """
    device = _Device(history, timing, window.depth)
    wait_s, per_level = window.draft_wait_ms / 1e3, window.nodes_per_level or 1.0
    waits = wait_s > 0.0 and timing.rtt_s <= wait_s
    now = nodes = owed = 0.0
    position = steps = 0
    while position < len(history):
        end = position
        rows = 0.0
        if window.k:
            if waits:
                now = max(now, min(device.arrival(position), now + wait_s))
            last = min(position + window.k, len(history))
            while end < last and history[end] != MISS and device.arrival(end) <= now:
                end += 1
            by_sibling = end > position and history[end - 1] == SIBLING
            rows = per_level * device.levels(position, end - by_sibling, now, window.k)
        now += timing.step_s(round(rows))
        nodes += rows
        steps += 1
        owed += server_gain
        by_server = int(owed)
        owed -= by_server
        position = min(max(end, position + by_server) + 1, len(history))
        device.receive(position, now)
    return Speed(len(history), steps, nodes, now)


class _Device:
    """The device, which says when the proposals for each position reach the verifier."""

    def __init__(self, history: Sequence[int], timing: LinkTiming, depth: int) -> None:
        self._history = history
        self._draft_s = timing.draft_s
        self._depth = depth
        self._half_s = timing.rtt_s / 2.0
        self._received: list[float] = []
        """C[p]"""
        self._arrivals: list[float] = []
        """A[p], as far as it depends on nothing to come."""
        self._drafted = 0.0
        """F of the last one of them."""

    def arrival(self, position: int) -> float:
        """Return A[p]; infinite while it depends on a token that has not been committed."""
        p = len(self._arrivals)
        if position != p:
            return self._arrivals[position] if position < p else math.inf
        known = self._time_of(p - 1)
        drafted = self._drafted if p and self._history[p - 1] == HIT else math.inf
        begun = max(min(known, drafted), self._time_of(p - self._depth))
        if begun == math.inf:
            return math.inf
        self._drafted = begun + self._draft_s
        self._arrivals.append(self._drafted + self._half_s)
        return self._arrivals[p]

    def levels(self, position: int, end: int, now: float, k: int) -> int:
        """Return the levels that a step at `now` evaluates: those before `end`, whose first proposals are accepted, the
        level at `end`, and the levels drafted below it."""
        if end == len(self._history) or self.arrival(end) > now:
            return end - position
        below = (now - self.arrival(end)) / self._draft_s if self._draft_s else math.inf
        return int(min(k, self._depth, end - position + 1 + below))

    def receive(self, end: int, now: float) -> None:
        """Commit all positions before `end` at `now`."""
        self._received += [now + self._half_s] * (end - len(self._received))
        while len(self._arrivals) < end and self.arrival(len(self._arrivals)) < math.inf:
            pass  # a proposal that arrives after its token still leads to those below it

    def _time_of(self, position: int) -> float:
        """Return when the device knows this token."""
        if position < 0:
            return 0.0
        return self._received[position] if position < len(self._received) else math.inf
