"""What the engine counts for operators: plain numbers, added to once a step and session, read four times a second."""

from __future__ import annotations

from collections.abc import Mapping

from outrider.core.histogram import ROWS, STEP_S, WAIT_S, Histogram
from outrider.core.telemetry import SessionTelemetry

POSITIONS = 32
"""Of a step's accepted tokens, that are told apart: what lies beyond is in the sum alone."""
STATES = ("queued", "prefill", "decode", "standing")
"""Of live sessions. queued: without a row so far. prefill: their prompts are being read. standing: so far ahead of what
their devices have confirmed that no step takes them."""


class EngineCounters:
    """Since the engine's begin, over all sessions. One thread."""

    def __init__(self) -> None:
        self.drafts = 0
        """Rows of a step, of one session each, that held nodes of its device."""
        self.dead = self.ignored = 0
        """Nodes of sessions that have ended; see SessionTelemetry."""
        self.step_s = Histogram(STEP_S)
        """Of steps, without what passes between them."""
        self.rows = Histogram(ROWS)
        self.part_s: dict[str, float] = {}
        """Seconds of all steps, by their parts."""
        self.first_token_s = Histogram(WAIT_S)
        """From a session's begin here to its first token, of sessions that began without any."""
        self.token_s = Histogram(STEP_S)
        """Between two of a session's tokens: what passes between two commits, in equal parts."""
        self.queue_s = Histogram(WAIT_S)
        """From a session's begin to its first rows."""
        self._accepted = [0] * (POSITIONS + 1)
        """Drafts by how many of their nodes were accepted in a row; the last is of as many or more."""

    def step(self, parts_s: Mapping[str, float], rows: int) -> None:
        """One forward pass and what is around it."""
        for part, seconds in parts_s.items():
            self.part_s[part] = self.part_s.get(part, 0.0) + seconds
        self.step_s.add(sum(parts_s.values()) - parts_s.get("between", 0.0))
        self.rows.add(rows)

    def draft(self, accepted: int) -> None:
        """A device's nodes were evaluated, and so many committed."""
        self.drafts += 1
        self._accepted[min(accepted, POSITIONS)] += 1

    def tokens(self, count: int, gap_s: float, first: bool) -> None:
        """A session's commit. gap_s: since the one before, or where it is the first since the session's begin."""
        if first:
            self.first_token_s.add(gap_s)
            if count > 1:
                self.token_s.add(0.0, count - 1)  # with the first
        else:
            self.token_s.add(gap_s / count, count)

    def left(self, session: SessionTelemetry) -> None:
        """A session has ended."""
        self.dead += session.dead
        self.ignored += session.ignored

    @property
    def accepted_by_position(self) -> list[int]:
        """Accepted nodes by position after the last committed token, the first is 0."""
        return [sum(self._accepted[position + 1 :]) for position in range(POSITIONS)]
