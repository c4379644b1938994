"""Hold the statistics of an engine: counters of all its sessions, moving averages, and the snapshot for its front."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from outrider.core.histogram import ROWS, STEP_S, WAIT_S, Histogram
from outrider.core.telemetry import SessionTelemetry, VerifierTelemetry

POSITIONS = 32
"""Number of positions of a step for which accepted nodes are counted; further ones are in the sum alone."""
STATES = ("queued", "prefill", "decode", "standing")
"""The states of live sessions. queued: no row so far. prefill: the prompt is being read. standing: so far ahead of what
the device has confirmed that no step takes the session."""


@dataclass(frozen=True)
class EngineStats:
    """The engine at one moment, beside its counters.

    sessions: live ones by id, and ended ones that were not stopped yet. kv_reserved: KV slots promised to live
    sessions; a new session can get the rest. kv_cached: KV slots with tokens that no live session needs, available to
    any. dead, ignored: as in EngineCounters, with live sessions. states: number of live sessions by state (STATES).
    """

    verifier: VerifierTelemetry
    sessions: Mapping[str, SessionTelemetry]
    kv_reserved: int
    kv_cached: int
    dead: int
    ignored: int
    states: Mapping[str, int]


class EngineCounters:
    """Count over all sessions since the engine began. Not thread-safe."""

    def __init__(self, now: float) -> None:
        self.steps = 0
        self.committed = 0
        """Tokens."""
        self.evaluated = self.accepted = 0
        """Nodes of devices."""
        self.own_evaluated = self.own_accepted = 0
        """Nodes of the server draft."""
        self.prefilled = 0
        """Prompt tokens whose keys and values were computed."""
        self.prefix_hits = self.prefix_tokens = 0
        """Sessions that began with cached tokens, and number of these tokens."""
        self.drafts = 0
        """Parts of steps, of one session each, that had nodes of its device."""
        self.dead = self.ignored = 0
        """Nodes of sessions that have ended; see SessionTelemetry."""
        self.rate = Rate(now)
        """Committed tokens per second."""
        self.step_s = Histogram(STEP_S)
        """Seconds of steps, without the time between them."""
        self.rows = Histogram(ROWS)
        """Rows of steps."""
        self.part_s: dict[str, float] = {}
        """Seconds of all steps by their parts."""
        self.first_token_s = Histogram(WAIT_S)
        """Seconds from a session's begin to its first token, for sessions that began without any."""
        self.token_s = Histogram(STEP_S)
        """Seconds from one token of a session to the next: the time between two commits in equal parts."""
        self.queue_s = Histogram(WAIT_S)
        """Seconds from a session's begin to its first rows."""
        self._accepted = [0] * (POSITIONS + 1)
        """Index -> drafts of which so many nodes were accepted; the last index is for as many or more."""

    def step(self, parts_s: Mapping[str, float], rows: int) -> None:
        """Count a forward pass, by the seconds of the step's parts."""
        for part, seconds in parts_s.items():
            self.part_s[part] = self.part_s.get(part, 0.0) + seconds
        self.step_s.add(sum(parts_s.values()) - parts_s.get("between", 0.0))
        self.rows.add(rows)

    def draft(self, evaluated: int, accepted: int, *, by_server: bool = False) -> None:
        """Count the nodes of one session in one step: its device's, or the server draft's."""
        if by_server:
            self.own_evaluated += evaluated
            self.own_accepted += accepted
            return
        self.evaluated += evaluated
        self.accepted += accepted
        if evaluated:
            self.drafts += 1
            self._accepted[min(accepted, POSITIONS)] += 1

    def commit(self, tokens: int, now: float, *, gap_s: float, first: bool) -> None:
        """Count a session's commit. gap_s: seconds since the last one; of the first one, since the session's begin."""
        self.committed += tokens
        self.rate.add(tokens, now)
        if first:
            self.first_token_s.add(gap_s)
            if tokens > 1:
                self.token_s.add(0.0, tokens - 1)  # they come with the first
        else:
            self.token_s.add(gap_s / tokens, tokens)

    def end(self, session: SessionTelemetry) -> None:
        """Count the nodes of a session that has ended."""
        self.dead += session.dead
        self.ignored += session.ignored

    @property
    def accepted_by_position(self) -> list[int]:
        """Accepted nodes by position after the last committed token, from 0."""
        return [sum(self._accepted[position + 1 :]) for position in range(POSITIONS)]


class MovingAverage:
    """Average samples with exponential weights; the first samples count by their plain mean."""

    def __init__(self, share: float = 0.05) -> None:
        self.value = 0.0
        self._share = share
        self._samples = 0

    def add(self, sample: float) -> None:
        self._samples += 1
        self.value += max(self._share, 1.0 / self._samples) * (sample - self.value)


class Rate:
    """Estimate events per second, each event weighted by exp(-age / memory_s)."""

    def __init__(self, now: float, memory_s: float = 5.0) -> None:
        self._memory_s = memory_s
        self._start = self._last = now
        self._weighted = 0.0

    def add(self, count: int, now: float) -> None:
        self._weighted = self._decayed(now) + count
        self._last = now

    def per_second(self, now: float) -> float:
        seen = self._memory_s * (1.0 - math.exp(-max(now - self._start, 1e-3) / self._memory_s))
        return self._decayed(now) / seen

    def _decayed(self, now: float) -> float:
        return self._weighted * math.exp(-(now - self._last) / self._memory_s)


@dataclass
class StepCounts:
    """Counts of one session's verification steps: tokens committed, nodes of its device evaluated and accepted."""

    steps: int = 0
    committed: int = 0
    evaluated: int = 0
    accepted: int = 0
