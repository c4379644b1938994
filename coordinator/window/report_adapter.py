"""Convert a verifier's telemetry to the controller's input, and the decisions to directives.

A session is decided about once enough is known of it, or of sessions with its workload key: their outcomes count like
earlier outcomes of its own, until it has enough of its own or has shown to be different. Before that its verifier's own
directive stands, within an operator's bounds. A session that shall not speculate still drafts a little, which no step
evaluates, so that it is noticed when its proposals become good again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from coordinator.records import Prior, Window, WindowBounds, WindowDecision
from coordinator.window import controller
from coordinator.window.controller import SessionView, VerifierView
from outrider.core.acceptance.history import HIT
from outrider.core.protocol.messages import Directive, SessionLimits
from outrider.core.step_cost import StepCost
from outrider.core.telemetry import SessionTelemetry, VerifierTelemetry

LEAST = 24
"""Outcomes before a session is decided about."""
RECENT = 192
"""Most outcomes that a session is judged by: with fewer, one of many sessions looks worse than it is by chance, and all
of them would have to follow it."""
CHANGED = 3.5
"""Difference between the last outcomes and those before, in standard deviations, from which the earlier ones are of
another text. At 9 to 14% of the positions of recorded texts some are cut for nothing, at 1 to 2% all but 24."""
LAST = range(16, 177, 8)
"""Numbers of last outcomes that are compared. A draft with an acceptance of 0.6 that fails is noticed within 32
outcomes, and within 16 if it recovers; fewer than LEAST are enough to go on with if they differ so much."""
_LAST = np.array(LAST[::-1])
"""The longest first, which counts of those that differ as much."""
SILENT = 64
"""Tokens without an outcome after which a device is taken to draft nothing."""
PROBE_DEPTH = 2
"""Levels that a device drafts ahead if no node is to be verified."""
PROBE_PER_LEVEL = 2.0
"""Nodes of such a level."""
UNSHOWN_DRAFT_MS = 5.0
"""Drafting time of a device whose verifier never waited for it, so that its own is not known; at most half a step."""
UNKNOWN = Window(6, 24, 0.0, 1.0)
"""The widest window of a session that has bounds, and of which too little is known."""

Ints = NDArray[np.int64]


def decide(
    verifier: VerifierTelemetry,
    sessions: Sequence[SessionTelemetry],
    before: Mapping[str, WindowDecision],
    bounds: Mapping[str, WindowBounds],
    limits: SessionLimits,
    priors: Mapping[str, Prior],
) -> dict[str, WindowDecision]:
    """Return the windows of a verifier's sessions by session id, of those that are decided about.

    before: the last decisions. bounds: by session id; those of "" are for all others. limits: of all of them.
    priors: by session id, of sessions with too few outcomes of their own.
    """
    if not verifier.step_cost_ms:
        return {}
    known = {key for key, prior in priors.items() if len(prior.acceptance_history) >= LEAST}
    with_prior = {s.session_id: len(s.acceptance_history) for s in sessions if s.session_id in known and wants_prior(s)}
    sessions = [_with(s, priors[s.session_id]) if s.session_id in with_prior else s for s in sessions]
    cost = StepCost({rows: ms / 1e3 for rows, ms in verifier.step_cost_ms.items()}, verifier.session_cost_ms / 1e3)
    between_s = verifier.timing_ms.get("between", 0.0) / 1e3
    plain_ms = 1e3 * (between_s + cost.seconds(len(sessions), len(sessions)))
    allowed = {s.session_id: bounds.get(s.session_id) or bounds.get("") for s in sessions}
    histories = latest([s.acceptance_history for s in sessions])
    views = [
        _view(s, history, before.get(s.session_id), allowed[s.session_id], limits, plain_ms)
        for s, history in zip(sessions, histories, strict=True)
    ]
    step_ms = next((decision.step_ms for decision in before.values()), 0.0) or verifier.step_ms
    decisions = controller.decide(VerifierView(cost, tuple(views), between_s, step_ms / 1e3))
    decided = {}
    for view in views:
        session_id = view.telemetry.session_id
        bound, decision = allowed[session_id], decisions[session_id]
        if view.bounds.pinned:
            decided[session_id] = decision
        elif view.fixed is None and (view.drafts or view.current is not None):
            if with_prior.get(session_id, LEAST) < LEAST:
                decision = replace(decision, reason=f"by its class's prior: {decision.reason}")
            decided[session_id] = _probing(view, _widened(view, decision) if len(views) == 1 else decision)
        elif bound is not None:
            decided[session_id] = _probing(view, _within(bound.window, decision))
    return decided


def directive(decision: WindowDecision, limits: SessionLimits) -> Directive:
    """Return the directive for the session's verifier and device."""
    window = decision.window
    per_level = (window.nodes_per_level or 1.0) if window.k else PROBE_PER_LEVEL
    return Directive(
        window_nodes=min(limits.nodes, math.ceil(window.depth * per_level)),
        window_depth=min(limits.depth, window.depth),
        nodes_per_step=min(limits.nodes, math.ceil(decision.max_k * per_level)),
        min_acceptance=decision.min_acceptance if window.k else 0.0,
        draft_wait_ms=math.ceil(window.draft_wait_ms or 0.0),
    )


def wants_prior(session: SessionTelemetry) -> bool:
    """Return whether the session has fewer outcomes than it is judged by, and is not known to draft nothing."""
    return len(session.acceptance_history) < RECENT and not _drafts_nothing(session)


def latest(histories: Sequence[bytes]) -> list[bytes]:
    """Return the last outcomes of each session, as far back as they are of one text: how well a draft does changes
    with it.

    Cut where the end differs most from the beginning, much as in adaptive windowing (Bifet and Gavalda, 2007).
    """
    kept = np.array([min(RECENT, len(history)) for history in histories], dtype=np.int64)
    padded = b"".join(history[-RECENT:].rjust(RECENT, b"\0") for history in histories)
    hit = np.frombuffer(padded, dtype=np.uint8).reshape(-1, RECENT)[:, ::-1] == HIT
    hits = np.pad(hit.cumsum(axis=1), ((0, 0), (1, 0)))  # of so many last outcomes
    rows = np.flatnonzero(kept)
    while len(rows):
        differences = _differences(kept[rows], hits[rows, kept[rows]], hits[rows][:, _LAST])
        cut = differences.max(axis=1) > CHANGED
        rows = rows[cut]
        kept[rows] = _LAST[differences[cut].argmax(axis=1)]
    return [history[len(history) - last :] for history, last in zip(histories, kept.tolist(), strict=True)]


def _differences(count: Ints, hits: Ints, later: Ints) -> NDArray[np.float64]:
    """Return by how many standard deviations the acceptance rates of the `_LAST` outcomes and of those before differ.

    0 stands where there are too few to tell. count, hits: of all outcomes, `[sessions]`; later: hits of the last.
    """
    earlier = np.maximum(count[:, None] - _LAST, 1)
    mean = (hits / count)[:, None]
    deviation = np.sqrt(mean * (1.0 - mean) * (1.0 / earlier + 1.0 / _LAST))
    tells = (count[:, None] - _LAST >= LAST[0]) & (deviation > 0.0)
    difference = np.abs((hits[:, None] - later) / earlier - later / _LAST)
    deviations: NDArray[np.float64] = np.divide(difference, deviation, out=np.zeros(tells.shape), where=tells)
    return deviations


def _with(session: SessionTelemetry, prior: Prior) -> SessionTelemetry:
    """Return the session with the prior's history before its own, which the prior has in it already."""
    own = len(session.acceptance_history)
    earlier = prior.acceptance_history[: max(0, len(prior.acceptance_history) - own)]
    return replace(
        session,
        acceptance_history=earlier + session.acceptance_history,
        draft_ms=session.draft_ms or prior.draft_ms,
        nodes_per_level=session.nodes_per_level or prior.nodes_per_level,
    )


def _drafts_nothing(session: SessionTelemetry) -> bool:
    return not session.acceptance_history and session.committed >= SILENT


def _known(session: SessionTelemetry) -> bool:
    """Return whether enough is known to decide about the session or, if it drafts nothing, to count it as streaming."""
    return _drafts_nothing(session) or (len(session.acceptance_history) >= LEAST and session.rtt_ms > 0.0)


def _view(
    session: SessionTelemetry,
    history: bytes,
    before: WindowDecision | None,
    allowed: WindowBounds | None,
    limits: SessionLimits,
    plain_ms: float,
) -> SessionView:
    current = before.window if before is not None and before.epoch == session.epoch else None
    steps, per_level = max(1, session.steps), max(1.0, session.nodes_per_level)
    fixed = None if _known(session) else (max(1.0, session.committed / steps), session.evaluated / steps)
    judged = SessionTelemetry(
        session.session_id,
        session.epoch,
        rtt_ms=session.rtt_ms,
        acceptance_history=history,
        draft_ms=session.draft_ms or min(UNSHOWN_DRAFT_MS, plain_ms / 2),
        nodes_per_level=per_level,
        server_gain=session.server_gain,
    )
    return SessionView(judged, current, _bounds(allowed, limits, per_level), fixed)


def _bounds(allowed: WindowBounds | None, limits: SessionLimits, nodes_per_level: float) -> WindowBounds:
    """Return the bounds that the operator and the tickets set together."""
    per_level = (allowed.window.nodes_per_level if allowed else None) or nodes_per_level
    depth = min(controller.MAX_DEPTH, limits.depth, int(limits.nodes / per_level))
    if allowed is None:
        return WindowBounds(Window(controller.K[-1], depth))
    k, depth = min(allowed.window.k, depth), min(allowed.window.depth, depth)
    if allowed.pinned:
        return WindowBounds(Window(k, depth, allowed.window.draft_wait_ms, per_level), pinned=True)
    return WindowBounds(Window(min(k, controller.K[-1]), depth))


def _within(bounds: Window, decision: WindowDecision) -> WindowDecision:
    k, depth = min(UNKNOWN.k, bounds.k), min(UNKNOWN.depth, bounds.depth)
    window = replace(UNKNOWN, k=k, depth=depth)
    return replace(decision, window=window, max_k=k, reason="too little is known of it; the operator's bounds")


def _widened(view: SessionView, decision: WindowDecision) -> WindowDecision:
    """Let the verifier, which knows each node, evaluate more for a session that shares its steps with no other."""
    bounds, window = view.bounds.window, decision.window
    if not window.k:
        return decision
    depth = min(bounds.depth, window.depth + bounds.k - window.k)
    return replace(decision, window=replace(window, depth=depth), max_k=min(bounds.k, depth))


def _probing(view: SessionView, decision: WindowDecision) -> WindowDecision:
    """Let a device that shall not speculate draft a little, which no step evaluates."""
    if decision.window.k:
        return decision
    window, depth = decision.window, min(PROBE_DEPTH, view.bounds.window.depth)
    probing = Window(0, depth, window.draft_wait_ms, window.nodes_per_level)
    return WindowDecision(**{**vars(decision), "window": probing})  # `replace` takes twice as long
