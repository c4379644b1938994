"""How far each session of a verifier speculates: a frozen snapshot in, a decision per session out. No state, no clock.

Goodput of the verifier, subject to every session being at least as fast as if all of them streamed plainly. What a
window brings a session comes from replaying its recorded verdicts (streaming.py); which windows go together is searched
for over all sessions at once (balance.py).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coordinator.window.streaming import LinkTiming, Window, replay
from coordinator.window.window_search import Option, Tables
from outrider.core.acceptance.history import HIT
from outrider.core.step_cost import StepCost

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


@dataclass(frozen=True)
class Bounds:
    """What an operator allows a session."""

    k: int = K[-1]
    depth: int = 32
    pinned: Window | None = None
    """This and nothing else, but for its patience."""
    draft_wait_s: float | None = None
    """Of the pinned one; None leaves it to the controller."""


@dataclass(frozen=True)
class SessionView:
    """What its verifier measured of one session."""

    session_id: str
    verdicts: bytes
    """Of its last positions, oldest first (outrider.core.acceptance.history); a prior's where it is new."""
    rtt_s: float
    draft_s: float = math.inf
    """Of its device for one more level; infinite where it drafts nothing."""
    nodes_per_level: float = 1.0
    current: Window | None = None
    """None for a new session."""
    bounds: Bounds = field(default_factory=Bounds)
    as_it_is: tuple[float, float] | None = None
    """Tokens and nodes per step of a session that is not to be decided about; it goes on so, fair or not."""

    @property
    def drafts(self) -> bool:
        return bool(self.verdicts) and self.draft_s < math.inf

    @property
    def failed(self) -> bool:
        return self.verdicts.count(HIT) < FAILED * len(self.verdicts)


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


@dataclass(frozen=True)
class Decision:
    """What a session shall do, and why."""

    window: Window
    min_acceptance: float
    """Commits that a node must bring to pay for its time."""
    speedup: float
    """Predicted, over streaming."""
    tokens_per_step: float
    """Predicted."""
    reason: str


_STREAMING = Option(Window(0, 0))


def decide(view: VerifierView, tolerance: float = TOLERANCE) -> Mapping[str, Decision]:
    """Session id -> what it shall do from now on.

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
    return {
        session.session_id: Decision(
            table[option].window,
            min_acceptance,
            table[option].tokens * plain_s / balance.step_s,
            table[option].tokens_per_step,
            _reason(session, table[option], table, plain_s, balance.step_s),
        )
        for session, table, option in zip(view.sessions, tables.options, balance.chosen, strict=True)
    }


def _options(session: SessionView, step_s: float, alone: bool) -> list[Option]:
    """Streaming first. step_s: of the steps that the session shares."""
    bounds, pinned = session.bounds, session.bounds.pinned
    if session.as_it_is is not None and pinned is None:
        tokens, nodes = session.as_it_is
        return [Option(_STREAMING.window, tokens, nodes, tokens, given=True)]
    # Only ratios matter to a replay. In steps of a twelfth they are the same for many, and from one second to the next.
    rtt, draft = _rounded(session.rtt_s / step_s), _rounded(session.draft_s / step_s)
    answer = rtt + 2.0 * draft
    near = min(SLACK * answer, NEAR) if answer <= NEAR else 0.0
    if pinned is not None:
        draft_wait = near if bounds.draft_wait_s is None else bounds.draft_wait_s / step_s
        window = replace(pinned, draft_wait_s=draft_wait * step_s)
        if not session.drafts:
            return [Option(window, 1.0, pinned.k * pinned.nodes_per_level, given=True)]
        return [_option(session, rtt, draft, window, draft_wait, given=True)]
    if not session.drafts:
        return [_STREAMING]
    ahead = math.ceil(rtt) + SPARE
    options = [_STREAMING]
    for k in K:
        if k <= min(bounds.k, bounds.depth):
            depth = min(k + ahead, bounds.depth)
            # In a batch nothing is gained by patience but where all have to wait: the others' step goes on, and to sit
            # it out would save one row. So it is granted there, and not counted on.
            for draft_wait in dict.fromkeys((0.0, near) if alone else (0.0,)):
                window = Window(depth, k, (draft_wait if alone else near) * step_s, session.nodes_per_level)
                options.append(_option(session, rtt, draft, window, draft_wait))
    return options


def _option(
    session: SessionView, rtt: float, draft: float, window: Window, draft_wait: float, *, given: bool = False
) -> Option:
    """What the window brings. rtt, draft and the patience that is counted on: in steps."""
    tokens, nodes, per_step = _per_step(session.verdicts, rtt, draft, window.k, window.depth, draft_wait)
    return Option(window, tokens, nodes * window.nodes_per_level, per_step, given)


def _rounded(ratio: float) -> float:
    if ratio == math.inf:
        return ratio
    return math.exp2(round(8.0 * math.log2(ratio)) / 8.0) if ratio > 1e-4 else 0.0


@functools.lru_cache(maxsize=1 << 16)
def _per_step(
    verdicts: bytes, rtt: float, draft: float, k: int, depth: int, draft_wait: float
) -> tuple[float, float, float]:
    """(tokens, levels evaluated) per length of a step, and tokens per step, which may have waited; times in steps."""
    speed = replay(verdicts, LinkTiming(rtt, draft, _unit), Window(depth, k, draft_wait))
    return speed.tokens_per_s, speed.nodes / speed.seconds, speed.tokens_per_step


def _unit(nodes: int) -> float:
    return 1.0


def _kept(session: SessionView, table: Sequence[Option], best: int, min_acceptance: float) -> int:
    """Which option is the session's window as it is, where no other is much better. Streaming takes the place of a
    draft that has failed even so: it may be hardly better, where nodes cost next to nothing."""
    if session.current is None or (table[best].window.k == 0 and session.failed):
        return best
    k, waits = session.current.k, bool(session.current.draft_wait_s)
    enough = table[best].gain(min_acceptance) - STICK * table[best].tokens
    same = (i for i, o in enumerate(table) if o.window.k == k and bool(o.window.draft_wait_s) == waits)
    return next((i for i in same if table[i].gain(min_acceptance) >= enough), best)


def _reason(session: SessionView, option: Option, table: Sequence[Option], plain_s: float, step_s: float) -> str:
    if session.bounds.pinned is not None:
        return "pinned by the operator"
    if not session.drafts:
        return "its device drafts nothing"
    if option.window.k == 0:
        best = max(table[1:], key=lambda other: other.tokens, default=None)
        tried = f"; the most that any window gives is {best.tokens:.2f} tokens a step" if best else ""
        return f"no window pays{tried}"
    return (
        f"{option.tokens_per_step:.2f} tokens a step for {option.nodes:.1f} nodes at RTT {1e3 * session.rtt_s:.0f} ms,"
        f" step {1e3 * step_s:.0f} ms ({1e3 * plain_s:.0f} plain)"
    )
