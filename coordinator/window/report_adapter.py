"""From a verifier's report to what its sessions are told: the controller's inputs and outputs, nothing else.

A session is decided about once enough is known of it, or of sessions of its kind: what these showed counts like
verdicts on its own earlier guesses, until it has enough of its own or has shown to be otherwise. Before that its
verifier's own directive stands, within an operator's bounds. One that shall not speculate still guesses a little, which
no step evaluates: so it is seen when its guesses become good again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from coordinator.records import Load, Prior, SessionStats, SessionWindow, WindowBounds
from coordinator.window import controller
from coordinator.window.controller import Bounds, Decision, SessionView, VerifierView
from coordinator.window.streaming import Window
from outrider.core.acceptance.history import HIT
from outrider.core.protocol.messages import Directive, SessionLimits
from outrider.core.step_cost import StepCost

LEAST = 24
"""Verdicts before a session is decided about."""
RECENT = 192
"""Verdicts that it is judged by at most: of fewer, those of one of many sessions look worse than they are, and all of
them would have to heed it."""
CHANGED = 3.5
"""Standard deviations between the last ones and those before, from which the latter are of another text. At 9 to 14% of
the positions of recorded texts some are cut for nothing, at 1 to 2% all but two dozen."""
LAST = range(16, 177, 8)
"""How many of the last ones are compared. A draft right six times in ten that fails shows within 32, and within 16
where it recovers; fewer than LEAST are enough to go on with where they differ so much."""
SILENT = 64
"""Tokens without a verdict after which a device is taken to draft nothing."""
PROBE_DEPTH = 2
"""Levels that are guessed ahead of the text where none is to be verified."""
PROBE_PER_LEVEL = 2.0
UNSHOWN_DRAFT_S = 0.005
"""Of a device whose drafting time has not shown, since its verifier never waited for it; or half a step if less."""
UNKNOWN = Window(24, 6)
"""The most that a session is told that has bounds, and of which too little is known."""


def decide(
    load: Load,
    sessions: Sequence[SessionStats],
    before: Mapping[str, SessionWindow],
    bounds: Mapping[str, WindowBounds],
    limits: SessionLimits,
    priors: Mapping[str, Prior],
) -> dict[str, SessionWindow]:
    """Session id -> its window from now on, for those of a verifier's sessions that are told one.

    before: what was decided last. bounds: by session id; those of "" are for all others. limits: of all of them.
    priors: what was seen of its kind, by the id of a session that has not shown enough of itself.
    """
    if not load.step_cost_ms:
        return {}
    known = {key for key, prior in priors.items() if len(prior.verdicts) >= LEAST}
    newcomers = {s.session_id for s in sessions if s.session_id in known and _is_new(s)}
    sessions = [_with(s, priors[s.session_id]) if s.session_id in known and wants_prior(s) else s for s in sessions]
    cost = StepCost({rows: ms / 1e3 for rows, ms in load.step_cost_ms.items()}, load.session_cost_ms / 1e3)
    between_s = load.timing_ms.get("between", 0.0) / 1e3
    plain_s = between_s + cost.seconds(len(sessions), len(sessions))
    allowed = {s.session_id: bounds.get(s.session_id) or bounds.get("") for s in sessions}
    views = [_view(s, before.get(s.session_id), allowed[s.session_id], limits, plain_s) for s in sessions]
    decisions = controller.decide(VerifierView(cost, tuple(views), between_s, load.step_ms / 1e3))
    decided = {}
    for session, view in zip(sessions, views, strict=True):
        bound, decision = allowed[session.session_id], decisions[session.session_id]
        if bound is not None and bound.pinned:
            decided[session.session_id] = _window(session, view, decision)
        elif view.as_it_is is None and (view.drafts or view.current is not None):
            if session.session_id in newcomers:
                decision = replace(decision, reason=f"by its class's prior: {decision.reason}")
            lone = len(sessions) == 1
            decided[session.session_id] = _window(session, view, decision, lone=lone)
        elif bound is not None:
            decided[session.session_id] = _window(session, view, _within(bound, decision))
    return decided


def directive(window: SessionWindow, limits: SessionLimits) -> Directive:
    """What the session's verifier and device are told."""
    per_level = window.nodes_per_level if window.k else PROBE_PER_LEVEL
    return Directive(
        window_nodes=min(limits.nodes, math.ceil(window.depth * per_level)),
        window_depth=min(limits.depth, window.depth),
        nodes_per_step=min(limits.nodes, math.ceil(window.most * per_level)),
        min_acceptance=window.min_acceptance if window.k else 0.0,
        draft_wait_ms=math.ceil(window.draft_wait_ms),
    )


def wants_prior(session: SessionStats) -> bool:
    """Whether it has shown less than it is judged by, and not that it drafts nothing."""
    return len(session.verdicts) < RECENT and not _drafts_nothing(session)


def latest(verdicts: bytes) -> bytes:
    """The last ones, as far back as they are of one text: a draft's luck changes with it.

    Cut where the end differs most from the beginning, much as in adaptive windowing (Bifet and Gavalda, 2007).
    """
    kept = verdicts[-RECENT:]
    while True:
        difference, last = max((_difference(kept[:-last], kept[-last:]), last) for last in LAST)
        if difference <= CHANGED:
            return kept
        kept = kept[-last:]


def _difference(earlier: bytes, later: bytes) -> float:
    """In standard deviations, had all been drawn alike; 0 where there are too few to tell."""
    if len(earlier) < LAST[0]:
        return 0.0
    hits, other = earlier.count(HIT), later.count(HIT)
    mean = (hits + other) / (len(earlier) + len(later))
    deviation = math.sqrt(mean * (1.0 - mean) * (1.0 / len(earlier) + 1.0 / len(later)))
    return abs(hits / len(earlier) - other / len(later)) / deviation if deviation else 0.0


def _is_new(session: SessionStats) -> bool:
    return len(session.verdicts) < LEAST and wants_prior(session)


def _with(session: SessionStats, prior: Prior) -> SessionStats:
    """The session as if its kind's guesses had been its own, before its own, which its kind's have in them already."""
    own = len(session.verdicts)
    return replace(
        session,
        verdicts=prior.verdicts[: max(0, len(prior.verdicts) - own)] + session.verdicts,
        draft_ms=session.draft_ms or prior.draft_ms,
        nodes_per_level=session.nodes_per_level or prior.nodes_per_level,
    )


def _drafts_nothing(session: SessionStats) -> bool:
    return not session.verdicts and session.committed >= SILENT


def _known(session: SessionStats) -> bool:
    """Well enough to decide about it, or for one that drafts nothing to count as streaming."""
    return _drafts_nothing(session) or (len(session.verdicts) >= LEAST and session.rtt_ms > 0.0)


def _view(
    session: SessionStats,
    before: SessionWindow | None,
    bounds: WindowBounds | None,
    limits: SessionLimits,
    plain_s: float,
) -> SessionView:
    current, as_it_is, per_level = None, None, max(1.0, session.nodes_per_level)
    if before is not None and before.epoch == session.epoch:
        current = Window(before.depth, before.k, before.draft_wait_ms / 1e3, before.nodes_per_level)
    if not _known(session):
        steps = max(1, session.steps)
        as_it_is = max(1.0, session.committed / steps), session.evaluated / steps
    return SessionView(
        session.session_id,
        latest(session.verdicts) if as_it_is is None else b"",
        session.rtt_ms / 1e3,
        session.draft_ms / 1e3 or min(UNSHOWN_DRAFT_S, plain_s / 2),
        per_level,
        current,
        _bounds(bounds, limits, per_level),
        as_it_is,
    )


def _bounds(allowed: WindowBounds | None, limits: SessionLimits, nodes_per_level: float) -> Bounds:
    """An operator's and the tickets' together."""
    per_level = (allowed.nodes_per_level if allowed else None) or nodes_per_level
    depth = min(Bounds.depth, limits.depth, int(limits.nodes / per_level))
    if allowed is None:
        return Bounds(depth=depth)
    k, depth = min(allowed.k, depth), min(allowed.depth, depth)
    pinned = Window(depth, k, nodes_per_level=per_level) if allowed.pinned else None
    draft_wait_s = None if allowed.draft_wait_ms is None else allowed.draft_wait_ms / 1e3
    return Bounds(min(k, Bounds.k), depth, pinned, draft_wait_s)


def _within(bounds: WindowBounds, decision: Decision) -> Decision:
    window = Window(min(UNKNOWN.depth, bounds.depth), min(UNKNOWN.k, bounds.k))
    return replace(decision, window=window, reason="too little is known of it; the operator's bounds")


def _window(session: SessionStats, view: SessionView, decision: Decision, *, lone: bool = False) -> SessionWindow:
    """lone: it shares its steps with nobody. Then the verifier's own pricing, which knows each node, may take more than
    was counted on, since nobody else pays for it."""
    window, judged = decision.window, view.verdicts or session.verdicts
    probes = window.k == 0 and view.bounds.pinned is None
    if lone and window.k:
        window = replace(window, depth=min(view.bounds.depth, window.depth + view.bounds.k - window.k))
    most = min(view.bounds.k, window.depth) if lone and window.k else window.k
    return SessionWindow(
        session_id=session.session_id,
        verifier_id=session.verifier_id,
        epoch=session.epoch,
        k=window.k,
        most=most,
        depth=min(PROBE_DEPTH, view.bounds.depth) if probes else window.depth,
        draft_wait_ms=1e3 * window.draft_wait_s,
        nodes_per_level=window.nodes_per_level,
        min_acceptance=decision.min_acceptance,
        speedup=decision.speedup,
        tokens_per_step=decision.tokens_per_step,
        reason=decision.reason,
        rtt_ms=session.rtt_ms,
        draft_ms=1e3 * view.draft_s,
        verdicts=len(judged),
        hits=judged.count(HIT) / max(1, len(judged)),
    )
