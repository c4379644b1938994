"""From a verifier's report to what its sessions are told: the controller's inputs and outputs, nothing else.

A session is decided about once enough is known of it; before that its verifier's own directive stands. One that shall
not speculate still guesses a little, which no step evaluates: so it is seen when its guesses become good again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from coordinator.records import Load, SessionStats, SessionWindow, WindowBounds
from coordinator.window import controller
from coordinator.window.controller import Bounds, Decision, SessionView, VerifierView
from coordinator.window.streaming import Window
from outrider.core.protocol.messages import Directive
from outrider.core.step_cost import StepCost
from outrider.core.verdicts import HIT

LEAST = 24
"""Verdicts before a session is decided about."""
RECENT = 96
"""Verdicts that it is judged by: a draft's luck changes with the text."""
PROBE = Directive(window_nodes=4, window_depth=2, nodes_per_step=0, price=0.0, patience_ms=0)
"""For who shall not speculate: two levels ahead of the text, whose guesses are judged and never evaluated."""
SLACK = 2.0
"""Of a patience that is told over one that is planned with: round trips vary, and who answers in time ends the wait."""
UNSHOWN_DRAFT_S = 0.005
"""Of a device that has never let its verifier wait: it drafts a level faster than this, or than half a step."""


def decide(
    load: Load,
    sessions: Sequence[SessionStats],
    before: Mapping[str, SessionWindow],
    bounds: Mapping[str, WindowBounds],
) -> dict[str, SessionWindow]:
    """Session id -> its window from now on, for all of a verifier's sessions that are well enough known.

    before: what was decided last. bounds: by session id; those of "" are for all others.
    """
    if not load.step_cost_ms:
        return {}
    cost = StepCost({rows: ms / 1e3 for rows, ms in load.step_cost_ms.items()}, load.session_cost_ms / 1e3)
    between_s = load.timing_ms.get("between", 0.0) / 1e3
    plain_s = between_s + cost.seconds(len(sessions), len(sessions))
    views = [_view(session, before.get(session.session_id), bounds, plain_s) for session in sessions]
    decisions = controller.decide(VerifierView(cost, tuple(views), between_s))
    decided = zip(sessions, views, strict=True)
    return {
        session.session_id: _window(session, view, decisions[session.session_id])
        for session, view in decided
        if _known(session) or view.bounds.pinned is not None
    }


def directive(window: SessionWindow) -> Directive:
    """What the session's verifier and device are told."""
    if window.k == 0:
        return PROBE
    return Directive(
        window_nodes=math.ceil(window.depth * window.nodes_per_level),
        window_depth=window.depth,
        nodes_per_step=math.ceil(window.k * window.nodes_per_level),
        price=window.price,
        patience_ms=math.ceil(SLACK * window.patience_ms),
    )


def _known(session: SessionStats) -> bool:
    return len(session.verdicts) >= LEAST and session.rtt_ms > 0.0


def _view(
    session: SessionStats, before: SessionWindow | None, bounds: Mapping[str, WindowBounds], plain_s: float
) -> SessionView:
    known = _known(session)
    draft_s = session.draft_ms / 1e3 or min(UNSHOWN_DRAFT_S, plain_s / 2)
    current = None
    if before is not None and before.epoch == session.epoch:
        current = Window(before.depth, before.k, before.patience_ms / 1e3, before.nodes_per_level)
    return SessionView(
        session.session_id,
        session.verdicts[-RECENT:] if known else b"",
        session.rtt_ms / 1e3,
        draft_s,
        session.nodes_per_level,
        current,
        _bounds(bounds.get(session.session_id) or bounds.get(""), session.nodes_per_level),
    )


def _bounds(allowed: WindowBounds | None, nodes_per_level: float) -> Bounds:
    if allowed is None:
        return Bounds()
    if allowed.pinned:
        return Bounds(pinned=Window(allowed.depth, allowed.k, nodes_per_level=nodes_per_level))
    return Bounds(allowed.k, allowed.depth)


def _window(session: SessionStats, view: SessionView, decision: Decision) -> SessionWindow:
    window = decision.window
    return SessionWindow(
        session_id=session.session_id,
        verifier_id=session.verifier_id,
        epoch=session.epoch,
        k=window.k,
        depth=window.depth,
        patience_ms=1e3 * window.patience_s,
        nodes_per_level=window.nodes_per_level,
        price=decision.price,
        speedup=decision.speedup,
        reason=decision.reason,
        rtt_ms=session.rtt_ms,
        draft_ms=1e3 * view.draft_s,
        verdicts=len(view.verdicts),
        hits=view.verdicts.count(HIT) / max(1, len(view.verdicts)),
    )
