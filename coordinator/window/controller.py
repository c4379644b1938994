"""Decide how far each session of a verifier speculates: a frozen snapshot in, a decision per session out.

The goal is the verifier's goodput, subject to every session being at least as fast as if all sessions streamed
plainly. What a window brings a session is predicted by replaying its acceptance history (streaming.py); which windows
go together is searched for over all sessions at once (window_search.py). There is no state and no clock.
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
from coordinator.window.window_search import Option, OptionTables
from outrider.core.acceptance.history import HIT
from outrider.core.step_cost import StepCost
from outrider.core.telemetry import SessionTelemetry

K = (1, 2, 3, 4, 6, 8, 12, 16)
"""Speculation lengths that are considered beside 0."""
MAX_DEPTH = 32
"""Window depth of a session without bounds."""
TOLERANCE = 0.02
"""Share by which a session may be slower than streaming: predictions are no better, and nodes are never quite free."""
STICK = 0.03
"""A session keeps its window unless another one is better by this share of its tokens per step."""
FAILED = 0.1
"""First acceptance below which a draft is no longer of use."""
ROUNDS = 3
"""Windows depend on the step's length and it on them; they settle after two rounds."""
SETTLED = 0.02
"""Share of a step by which another round may still change it."""
SPARE = 2
"""Levels that a device runs further ahead than is needed on average: too far costs little, too short idles the link."""
MOST_PER_LEVEL = 4
"""Nodes of a level, its siblings included, up to which the cost of a step is tabulated."""
NEAR = 0.4
"""Longest draft wait that is considered, in steps."""
SLACK = 2.0
"""Draft wait over the time in which nodes are expected: round trips vary, and nodes that arrive end the wait."""
STREAMING = Window(0, 0, 0.0, 1.0)
WIDEST = WindowBounds(Window(K[-1], MAX_DEPTH))


@dataclass(frozen=True)
class SessionView:
    """A session as the controller sees it."""

    telemetry: SessionTelemetry
    """As its verifier reports it. The acceptance history is cut to what decisions are made from, and begins with that
    of its workload key if the session is new; draft_ms is assumed where it is not known, and infinite if the device
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
    def server_gain(self) -> float:
        """Tokens that the verifier's own nodes add to a step without the device's; rounded, for equal predictions."""
        return round(self.telemetry.server_gain, 1)

    @property
    def first_acceptance(self) -> float:
        """Share of the positions whose first proposal was accepted."""
        history = self.telemetry.acceptance_history
        return history.count(HIT) / max(1, len(history))


@dataclass(frozen=True)
class VerifierView:
    """A verifier and its live sessions, as the controller sees them."""

    cost: StepCost
    sessions: tuple[SessionView, ...]
    between_s: float = 0.0
    """Time between two steps."""
    step_now_s: float = 0.0
    """Present length of a step; 0 if not known. With it decisions settle at once if windows change little."""

    @functools.cached_property
    def _steps_s(self) -> NDArray[np.float64]:
        count = len(self.sessions)
        nodes = np.arange(count * K[-1] * MOST_PER_LEVEL + 1)
        return self.between_s + self.cost.curve(count + nodes, count)

    def step_s(self, nodes: ArrayLike) -> NDArray[np.float64]:
        """Return the seconds `[n]` of steps with every session and so many nodes `[n]`, which are averages."""
        count = np.asarray(nodes, dtype=np.float64)
        steps_s = self._steps_s
        below = np.minimum(count.astype(np.int64), len(steps_s) - 2)
        interpolated: NDArray[np.float64] = steps_s[below] + (count - below) * (steps_s[below + 1] - steps_s[below])
        return interpolated


def decide(view: VerifierView, tolerance: float = TOLERANCE) -> Mapping[str, WindowDecision]:
    """Return the window of each session by its id.

    tolerance: share by which a session may be slower than streaming; 1 asks for goodput alone.
    """
    if not view.sessions:
        return {}
    plain_s = float(view.step_s(0))
    step_s = view.step_now_s or plain_s
    for _ in range(ROUNDS):
        tables = OptionTables(
            [_options(session, step_s, len(view.sessions) == 1) for session in view.sessions], view.step_s
        )
        # Given nodes are there in any case: no session shall be slower than if all others streamed plainly.
        least = (1.0 - tolerance) / float(view.step_s(tables.given_nodes))
        balance = tables.best(least)
        settled = abs(balance.step_s - step_s) < SETTLED * step_s
        step_s = balance.step_s
        if settled:
            break
    each = zip(view.sessions, tables.options, balance.chosen, strict=True)
    kept = tables.of(balance.min_acceptance, [_kept(*one, balance.min_acceptance) for one in each])
    if kept.slowest >= least:
        balance = tables.polished(kept, least, STICK)  # a kept window may leave more, or less, for the others
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
    """Return the windows that a session may have, streaming first, with what each brings.

    step_s: length of the steps that the session shares. alone: no other session shares them.
    """
    bounds, pinned = session.bounds.window, session.bounds.pinned
    plain = 1.0 + session.server_gain
    if session.fixed is not None and not pinned:
        tokens, nodes = session.fixed
        return [Option(STREAMING, tokens, nodes, tokens, given=True)]
    # Only ratios to the step matter to a replay. Rounded, they are equal for many sessions and from second to second.
    step_ms = 1e3 * step_s
    rtt, draft = _rounded(session.telemetry.rtt_ms / step_ms), _rounded(session.telemetry.draft_ms / step_ms)
    answer = rtt + 2.0 * draft
    near = min(SLACK * answer, NEAR) if answer <= NEAR else 0.0
    if pinned:
        wait = near if bounds.draft_wait_ms is None else bounds.draft_wait_ms / step_ms
        window = replace(bounds, draft_wait_ms=wait * step_ms)
        if not session.drafts:
            return [Option(window, plain, window.k * (window.nodes_per_level or 1.0), given=True)]
        return [_option(session, rtt, draft, window, wait, given=True)]
    options = [Option(STREAMING, plain, 0.0, plain)]
    if not session.drafts:
        return options
    ahead = math.ceil(rtt) + SPARE
    for k in K:
        if k <= min(bounds.k, bounds.depth):
            depth = min(k + ahead, bounds.depth)
            # In a batch nothing is gained by waiting but where all have to wait: the others' step goes on, and to sit
            # it out would save one row. So the wait is granted there, and not counted on. It is also granted where the
            # verifier has nodes of its own: what these cost, and a wait may save, only its engine knows.
            for wait in dict.fromkeys((0.0, near) if alone else (0.0,)):
                granted_ms = (wait if alone and not session.server_gain else near) * step_ms
                window = Window(k, depth, granted_ms, session.telemetry.nodes_per_level)
                options.append(_option(session, rtt, draft, window, wait))
    return options


def _option(
    session: SessionView, rtt: float, draft: float, window: Window, wait: float, *, given: bool = False
) -> Option:
    """Return what the window brings. rtt, draft and the draft wait that is counted on are in steps."""
    history = session.telemetry.acceptance_history
    tokens, levels, per_step = _per_step(history, rtt, draft, window.k, window.depth, wait, session.server_gain)
    return Option(window, tokens, levels * (window.nodes_per_level or 1.0), per_step, given)


def _rounded(ratio: float) -> float:
    if ratio == math.inf:
        return ratio
    return math.exp2(round(8.0 * math.log2(ratio)) / 8.0) if ratio > 1e-4 else 0.0


@functools.lru_cache(maxsize=1 << 16)
def _per_step(
    history: bytes, rtt: float, draft: float, k: int, depth: int, wait: float, server_gain: float
) -> tuple[float, float, float]:
    """Return (tokens, levels evaluated) per length of a step, and tokens per step, which may have waited.

    Times are in steps: the replay takes a step for a second.
    """
    speed = replay(history, LinkTiming(rtt, draft, lambda nodes: 1.0), Window(k, depth, 1e3 * wait), server_gain)
    return speed.tokens_per_s, speed.nodes / speed.seconds, speed.tokens_per_step


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
