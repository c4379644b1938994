"""How far each session of a verifier speculates: a frozen snapshot in, a decision per session out. No state, no clock.

Goodput of the verifier, subject to every session being at least as fast as if all of them streamed plainly. What a
window brings a session comes from replaying its recorded verdicts (streaming.py); which windows go together is searched
for over all sessions at once (balance.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coordinator.records import Window, WindowBounds, WindowDecision
from coordinator.window.streaming import LinkTiming, replay
from coordinator.window.window_search import Option, Tables
from outrider.core.acceptance.history import HIT
from outrider.core.step_cost import StepCost
from outrider.core.telemetry import SessionTelemetry

K = (1, 2, 3, 4, 6, 8, 12, 16)
"""Levels per step that are considered, beside 0."""
TOLERANCE = 0.02
"""By which a session may be slower than streaming: predictions are no better, and nodes are nowhere quite free."""
STICK = 0.03
"""A session keeps its window unless another is better by this share of its tokens per step."""
FAILED = 0.1
"""Share of first guesses that are right, below which a draft is no longer of use."""
ROUNDS = 3
"""Windows depend on the step's length and it on them; they settle after two."""
SETTLED = 0.02
"""Share of a step by which another round may still change it."""
SPARE = 2
"""Levels that a device runs further ahead than is needed on average: too far costs it little, too short the link."""
MOST_PER_LEVEL = 4
"""Nodes: a guess and its siblings."""
NEAR = 0.4
"""Of a step: the longest patience that is considered."""
SLACK = 2.0
"""Of patience over the time in which an answer is expected: round trips vary, and who answers in time ends the wait."""


MAX_DEPTH = 32
"""Window depth of a session without bounds."""
STREAMING = Window(0, 0, 0.0, 1.0)
WIDEST = WindowBounds(Window(K[-1], MAX_DEPTH))


@dataclass(frozen=True)
class SessionView:
    """A session as the controller sees it."""

    telemetry: SessionTelemetry
    """As its verifier reports it. The acceptance history is cut to what decisions are made from, and begins with that
    of its workload key if the session is new; draft_ms is a guess where it is not known, and infinite if the device
    drafts nothing; nodes_per_level is at least 1."""
    current: Window | None = None
    """None for a new session."""
    bounds: WindowBounds = WIDEST
    fixed: tuple[float, float] | None = None
    """Tokens and nodes per step of a session of which too little is known to decide: it goes on so, fair or not."""

    @property
    def drafts(self) -> bool:
        return self.fixed is None and bool(self.telemetry.acceptance_history) and self.telemetry.draft_ms < math.inf

    @property
    def first_acceptance(self) -> float:
        """Share of the positions whose first proposal was accepted."""
        history = self.telemetry.acceptance_history
        return history.count(HIT) / max(1, len(history))


@dataclass(frozen=True)
class VerifierView:
    """A verifier and its live sessions."""

    cost: StepCost
    sessions: tuple[SessionView, ...]
    between_s: float = 0.0
    """What passes between two steps anyhow."""

    step_now_s: float = 0.0
    """A step's length at present, which need not be known; where windows change little it is found at once."""

    @functools.cached_property
    def _steps_s(self) -> NDArray[np.float64]:
        count = len(self.sessions)
        nodes = np.arange(count * K[-1] * MOST_PER_LEVEL + 1)
        return self.between_s + self.cost.curve(count + nodes, count)

    def step_s(self, nodes: ArrayLike) -> NDArray[np.float64]:
        """Seconds `[n]` of a step with every session and so many nodes `[n]`, which are averages."""
        wanted = np.asarray(nodes, dtype=np.float64)
        below = np.minimum(wanted.astype(np.int64), len(self._steps_s) - 2)
        steps_s = self._steps_s
        found: NDArray[np.float64] = steps_s[below] + (wanted - below) * (steps_s[below + 1] - steps_s[below])
        return found


def decide(view: VerifierView, tolerance: float = TOLERANCE) -> Mapping[str, WindowDecision]:
    """Return the window of each session by its id.

    tolerance: by which share of streaming's speed a session may be slower; 1 asks for goodput alone.
    """
    if not view.sessions:
        return {}
    plain_s = float(view.step_s(0))
    step_s = view.step_now_s or plain_s
    for _ in range(ROUNDS):
        tables = Tables([_options(session, step_s, len(view.sessions) == 1) for session in view.sessions], view.step_s)
        # What is given is there anyhow: nobody shall be slower than if all that is ours to choose were streaming.
        least = (1.0 - tolerance) / float(view.step_s(tables.given_nodes))
        balance = tables.best(least)
        settled = abs(balance.step_s - step_s) < SETTLED * step_s
        step_s = balance.step_s
        if settled:
            break
    each = zip(view.sessions, tables.options, balance.chosen, strict=True)
    kept = tables.of(balance.min_acceptance, [_kept(*one, balance.min_acceptance) for one in each])
    if kept.slowest >= least:
        balance = tables.polished(kept, least, STICK)  # what stays as it is may leave more, or less, for others
    min_acceptance = tables.node_min_acceptance(balance)
    chosen = [table[option] for table, option in zip(tables.options, balance.chosen, strict=True)]
    return {
        session.telemetry.session_id: WindowDecision(
            session_id=session.telemetry.session_id,
            epoch=session.telemetry.epoch,
            window=option.window,
            min_acceptance=min_acceptance,
            speedup=option.tokens * plain_s / balance.step_s,
            tokens_per_step=option.tokens_per_step,
            reason=_reason(session, option, table, plain_s, balance.step_s),
            rtt_ms=session.telemetry.rtt_ms,
            draft_ms=session.telemetry.draft_ms,
            observations=len(session.telemetry.acceptance_history),
            first_acceptance=session.first_acceptance,
            max_k=option.window.k,
        )
        for session, table, option in zip(view.sessions, tables.options, chosen, strict=True)
    }


def _options(session: SessionView, step_s: float, alone: bool) -> list[Option]:
    """Streaming first. step_s: of the steps that the session shares."""
    bounds, pinned = session.bounds.window, session.bounds.pinned
    if session.fixed is not None and not pinned:
        tokens, nodes = session.fixed
        return [Option(STREAMING, tokens, nodes, tokens, given=True)]
    # Only ratios matter to a replay. In steps of a twelfth they are the same for many, and from one second to the next.
    step_ms = 1e3 * step_s
    rtt, draft = _rounded(session.telemetry.rtt_ms / step_ms), _rounded(session.telemetry.draft_ms / step_ms)
    answer = rtt + 2.0 * draft
    near = min(SLACK * answer, NEAR) if answer <= NEAR else 0.0
    if pinned:
        wait = near if bounds.draft_wait_ms is None else bounds.draft_wait_ms / step_ms
        window = replace(bounds, draft_wait_ms=wait * step_ms)
        if not session.drafts:
            return [Option(window, 1.0, window.k * (window.nodes_per_level or 1.0), given=True)]
        return [_option(session, rtt, draft, window, wait, given=True)]
    options = [Option(STREAMING)]
    if not session.drafts:
        return options
    ahead = math.ceil(rtt) + SPARE
    for k in K:
        if k <= min(bounds.k, bounds.depth):
            depth = min(k + ahead, bounds.depth)
            # In a batch nothing is gained by waiting but where all have to wait: the others' step goes on, and to sit
            # it out would save one row. So the wait is granted there, and not counted on.
            for wait in dict.fromkeys((0.0, near) if alone else (0.0,)):
                granted_ms = (wait if alone else near) * step_ms
                window = Window(k, depth, granted_ms, session.telemetry.nodes_per_level)
                options.append(_option(session, rtt, draft, window, wait))
    return options


def _option(
    session: SessionView, rtt: float, draft: float, window: Window, wait: float, *, given: bool = False
) -> Option:
    """Return what the window brings. rtt, draft and the draft wait that is counted on are in steps."""
    history = session.telemetry.acceptance_history
    tokens, levels, per_step = _per_step(history, rtt, draft, window.k, window.depth, wait)
    return Option(window, tokens, levels * (window.nodes_per_level or 1.0), per_step, given)


def _rounded(ratio: float) -> float:
    if ratio == math.inf:
        return ratio
    return math.exp2(round(8.0 * math.log2(ratio)) / 8.0) if ratio > 1e-4 else 0.0


@functools.lru_cache(maxsize=1 << 16)
def _per_step(history: bytes, rtt: float, draft: float, k: int, depth: int, wait: float) -> tuple[float, float, float]:
    """Return (tokens, levels evaluated) per length of a step, and tokens per step, which may have waited.

    Times are in steps: the replay takes a step for a second.
    """
    speed = replay(history, LinkTiming(rtt, draft, _one_second), Window(k, depth, 1e3 * wait))
    return speed.tokens_per_s, speed.nodes / speed.seconds, speed.tokens_per_step


def _one_second(nodes: int) -> float:
    return 1.0


def _kept(session: SessionView, table: Sequence[Option], best: int, min_acceptance: float) -> int:
    """Return the option that is the session's present window, unless another is much better.

    Streaming takes the place of a draft that has failed in any case: it may be hardly better, where nodes cost next to
    nothing.
    """
    failed = session.first_acceptance < FAILED and bool(session.telemetry.acceptance_history)
    if session.current is None or (table[best].window.k == 0 and failed):
        return best
    k, waits = session.current.k, bool(session.current.draft_wait_ms)
    enough = table[best].gain(min_acceptance) - STICK * table[best].tokens
    same = (i for i, o in enumerate(table) if o.window.k == k and bool(o.window.draft_wait_ms) == waits)
    return next((i for i in same if table[i].gain(min_acceptance) >= enough), best)


def _reason(session: SessionView, option: Option, table: Sequence[Option], plain_s: float, step_s: float) -> str:
    if session.bounds.pinned:
        return "pinned by the operator"
    if not session.drafts:
        return "its device drafts nothing"
    if option.window.k == 0:
        best = max(table[1:], key=lambda other: other.tokens, default=None)
        tried = f"; the most that any window gives is {best.tokens:.2f} tokens a step" if best else ""
        return f"no window pays{tried}"
    return (
        f"{option.tokens_per_step:.2f} tokens a step for {option.nodes:.1f} nodes"
        f" at RTT {session.telemetry.rtt_ms:.0f} ms, step {1e3 * step_s:.0f} ms ({1e3 * plain_s:.0f} plain)"
    )
