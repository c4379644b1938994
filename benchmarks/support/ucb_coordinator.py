"""Run a coordinator whose sessions have the windows of UCB-SpecStop instead of the controller's.

    python -m benchmarks.support.ucb_coordinator --listen HOST:PORT ...

It decides with each report, as the product does, and pins what it chose; depth, draft wait and nodes per level follow
the product's rules. There is one bandit for all sessions, so this fits devices that have the same link and draft.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks.support.ucb_specstop import UcbSpecStop
from coordinator import app
from coordinator.records import Prior, Window, WindowBounds, WindowDecision
from coordinator.window import report_adapter
from coordinator.window.controller import SPARE
from outrider.core.protocol.messages import SessionLimits
from outrider.core.telemetry import SessionTelemetry, VerifierTelemetry
from outrider.processes import leave_after

_decide = report_adapter.decide


class UcbWindows:
    """Decides in place of coordinator.window.report_adapter.decide."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._bandit = UcbSpecStop()
        self._clock = clock
        self._begun: dict[str, tuple[int, float, SessionTelemetry]] = {}
        """Session -> the levels that it was given, when, and what it had done by then."""

    def decide(
        self,
        verifier: VerifierTelemetry,
        sessions: Sequence[SessionTelemetry],
        before: Mapping[str, WindowDecision],
        bounds: Mapping[str, WindowBounds],
        limits: SessionLimits,
        priors: Mapping[str, Prior],
    ) -> dict[str, WindowDecision]:
        """Learn from what the last windows brought, and pin the next ones."""
        now = self._clock()
        for session in sessions:
            levels, since, then = self._begun.get(session.session_id, (0, now, session))
            if levels and session.epoch == then.epoch:
                tokens, steps = session.committed - then.committed, session.steps - then.steps
                self._bandit.observe(levels, now - since, tokens, steps)
        levels = self._bandit.choose()
        pinned = {}
        for session in sessions:
            ahead = math.ceil(session.rtt_ms / verifier.step_ms) if verifier.step_ms else 0
            pinned[session.session_id] = WindowBounds(Window(levels, levels + ahead + SPARE), pinned=True)
        decisions = _decide(verifier, sessions, before, {**bounds, **pinned}, limits, priors)
        self._begun = {one.session_id: (levels, now, one) for one in sessions if one.session_id in decisions}
        return decisions


if __name__ == "__main__":
    report_adapter.decide = UcbWindows().decide
    leave_after(app.main)
