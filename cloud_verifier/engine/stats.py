"""Hold an engine's statistics: counters over all sessions, moving averages, and the snapshot for the front process."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from outrider.core.histogram import ROWS, STEP_S, WAIT_S, Histogram
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry, VerifierTelemetry

POSITIONS = 32
"""Positions of a step for which accepted nodes are counted one by one; nodes beyond them are only in the total."""
STATES = ("queued", "prefill", "decode", "stalled")
"""States of live sessions. queued: it has had no row yet. prefill: its prompt is being computed. decode: it generates
tokens. stalled: no step takes it until the device confirms more of the tokens that were sent."""


@dataclass(frozen=True)
class EngineStats:
    """A snapshot of the engine, which complements EngineCounters.

    sessions: live ones by id, and ended ones that were not stopped yet. kv_reserved: KV slots reserved for live
    sessions; a new session can get the rest. kv_cached: KV slots with tokens that no live session needs, available to
    any. dead, ignored: nodes of all sessions so far (see SessionTelemetry). states: live sessions by state (STATES).
    unrecorded: tokens of recorded sessions that a failure has kept from being recorded.
    """

    verifier: VerifierTelemetry
    sessions: Mapping[str, SessionTelemetry]
    kv_reserved: int
    kv_cached: int
    dead: int
    ignored: int
    states: Mapping[str, int]
    unrecorded: int = 0


class SpeculationCounters:
    """Counts what became of devices' nodes, and the tokens that were committed."""

    def __init__(self) -> None:
        self.committed = 0
        """Tokens."""
        self.evaluated = self.accepted = 0
        """Nodes that devices proposed."""
        self.drafts = 0
        """Times that a step evaluated nodes of a session's device: a step with n such sessions counts n."""
        self._accepted = [0] * (POSITIONS + 1)
        """Index n: number of `drafts` with n accepted nodes; the last index also counts those with more."""

    def add_nodes(self, evaluated: int, accepted: int) -> None:
        """Count the nodes of one session's device in one step."""
        self.evaluated += evaluated
        self.accepted += accepted
        if evaluated:
            self.drafts += 1
            self._accepted[min(accepted, POSITIONS)] += 1

    @property
    def accepted_by_position(self) -> list[int]:
        """Return accepted nodes by position; position 0 is the one after the last committed token."""
        return [sum(self._accepted[position + 1 :]) for position in range(POSITIONS)]


class EngineCounters(SpeculationCounters):
    """Holds the counts over all sessions since the engine started. Not thread-safe."""

    def __init__(self, now: float) -> None:
        super().__init__()
        self.lossy = SpeculationCounters()
        """The part of sessions with a lossy acceptance rule."""
        self.steps = 0
        self.server_evaluated = self.server_accepted = 0
        """Nodes of the verifier's own that no device proposed."""
        self.sources: dict[str, tuple[int, int]] = {}
        """(evaluated, accepted) nodes by the verifier's source; one that several proposed counts for each of them."""
        self.prefilled = 0
        """Prompt tokens whose keys and values were computed."""
        self.prefix_hits = self.prefix_tokens = 0
        """Sessions that began with cached tokens, and number of these tokens."""
        self.dead = self.ignored = 0
        """Nodes of sessions that have ended, as SessionTelemetry defines them; EngineStats adds the live sessions."""
        self.rate = Rate(now)
        """Committed tokens per second."""
        self.step_s = Histogram(STEP_S)
        """Seconds per step, without the time between steps."""
        self.rows = Histogram(ROWS)
        """Rows per step."""
        self.part_s: dict[str, float] = {}
        """Total seconds by part of a step (step_profiler.PARTS)."""
        self.first_token_s = Histogram(WAIT_S)
        """Time to first token: seconds from a session's start, for sessions that started without generated tokens."""
        self.token_s = Histogram(STEP_S)
        """Inter-token latency: seconds since the previous commit, divided equally among the tokens of a commit."""
        self.queue_s = Histogram(WAIT_S)
        """Seconds from a session's start to its first rows."""

    def count_step(self, parts_s: Mapping[str, float], rows: int) -> None:
        """Count a step. parts_s: seconds by part, among them the part between this step and the last one."""
        for part, seconds in parts_s.items():
            self.part_s[part] = self.part_s.get(part, 0.0) + seconds
        self.step_s.add(sum(parts_s.values()) - parts_s.get("between", 0.0))
        self.rows.add(rows)

    def count_nodes(
        self,
        evaluated: int,
        accepted: int,
        sources: Mapping[str, tuple[int, int]] | None = None,
        *,
        lossy: bool = False,
    ) -> None:
        """Count the nodes of one session in one step: its device's, and those of the verifier's sources by name.

        evaluated, accepted: of the device. sources: (evaluated, accepted) of each. lossy: by the session's acceptance
        rule.
        """
        self.add_nodes(evaluated, accepted)
        if lossy:
            self.lossy.add_nodes(evaluated, accepted)
        for name, (tried, right) in (sources or {}).items():
            before = self.sources.get(name, (0, 0))
            self.sources[name] = before[0] + tried, before[1] + right

    def count_commit(self, tokens: int, now: float, *, gap_s: float, first: bool, lossy: bool = False) -> None:
        """Count a session's commit.

        gap_s: seconds since its previous commit; for the first one, since its start. lossy: by its acceptance rule.
        """
        self.committed += tokens
        if lossy:
            self.lossy.committed += tokens
        self.rate.add(tokens, now)
        if first:
            self.first_token_s.add(gap_s)
            if tokens > 1:
                self.token_s.add(0.0, tokens - 1)  # they arrive together with the first token
        else:
            self.token_s.add(gap_s / tokens, tokens)

    def count_ended(self, session: SessionTelemetry) -> None:
        """Add the dead and ignored nodes of a session that has ended."""
        self.dead += session.dead
        self.ignored += session.ignored


class MovingAverage:
    """An exponential moving average; of few samples, the plain mean. alpha: weight of a new sample, 0 to 1."""

    def __init__(self, alpha: float = 0.05) -> None:
        self.value = 0.0
        self._alpha = alpha
        self._samples = 0

    def add(self, sample: float) -> None:
        self._samples += 1
        self.value += max(self._alpha, 1.0 / self._samples) * (sample - self.value)


class Rate:
    """Estimates events per second; in the estimate an event has the weight exp(-age / decay_s)."""

    def __init__(self, now: float, decay_s: float = 5.0) -> None:
        self._decay_s = decay_s
        self._start = self._last = now
        self._weighted = 0.0

    def add(self, count: int, now: float) -> None:
        self._weighted = self._decayed(now) + count
        self._last = now

    def per_second(self, now: float) -> float:
        weight = self._decay_s * (1.0 - math.exp(-max(now - self._start, 1e-3) / self._decay_s))
        return self._decayed(now) / weight

    def _decayed(self, now: float) -> float:
        return self._weighted * math.exp(-(now - self._last) / self._decay_s)
