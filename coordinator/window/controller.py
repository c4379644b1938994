"""How far each session of a verifier speculates: a frozen snapshot in, a decision per session out. No state, no clock.

Goodput of the verifier, subject to every session being at least as fast as if all of them streamed plainly:

    maximise  G = sum E_i / t(sum (1 + n_i))     subject to  E_i / t(...) >= 1 / t(M)     for each of the M sessions

E_i and n_i, tokens and nodes of a step, come from replaying the session's recorded verdicts (streaming.py). At the
maximum a session's window maximises E_i - price * n_i, with one price for all: commits that a node's time is worth
elsewhere (as in goodput-optimal speculation, arXiv 2406.14066). So two scalars are searched, the length of the step and
the price; what they leave, since windows are whole numbers, single changes then pick up.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from coordinator.window.streaming import Way, Window, replay
from outrider.core.step_cost import StepCost

K = (1, 2, 3, 4, 6, 8, 12, 16)
"""Levels per step that are considered, beside 0."""
PRICES = (0.0, *(0.01 * 1.15**i for i in range(34)), 1.0)
"""Commits per node; at 1 no node is worth anything, since it commits at most one token."""
TOLERANCE = 0.02
"""By which a session may be slower than streaming: predictions are no better, and nodes are nowhere quite free."""
STICK = 0.03
"""A session keeps its window unless another is better by this share of its tokens per step."""
ROUNDS = 3
"""Windows depend on the step's length and it on them; they settle after two."""
FINER = 1.05
"""The total of nodes is searched in steps of this factor."""
PASSES = 3
"""Over all sessions, in search of single changes."""
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
    patience_s: float | None = None
    """Of the pinned one; None leaves it to the controller."""


@dataclass(frozen=True)
class SessionView:
    """What its verifier measured of one session."""

    session_id: str
    verdicts: bytes
    """Of its last positions, oldest first (outrider.core.verdicts); a prior's where it is new."""
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


@dataclass(frozen=True)
class VerifierView:
    """A verifier and its live sessions."""

    cost: StepCost
    sessions: tuple[SessionView, ...]
    between_s: float = 0.0
    """What passes between two steps anyhow."""

    @functools.cached_property
    def _steps_s(self) -> list[float]:
        count = len(self.sessions)
        nodes = np.arange(count * K[-1] * MOST_PER_LEVEL + 1)
        steps: list[float] = (self.between_s + self.cost.curve(count + nodes, count)).tolist()
        return steps

    def step_s(self, nodes: float) -> float:
        """Of a step with every session and so many nodes, which are an average."""
        below = min(int(nodes), len(self._steps_s) - 2)
        return self._steps_s[below] + (nodes - below) * (self._steps_s[below + 1] - self._steps_s[below])


@dataclass(frozen=True)
class Decision:
    """What a session shall do, and why."""

    window: Window
    price: float
    """Commits that a node must bring to pay for its time."""
    speedup: float
    """Predicted, over streaming."""
    tokens_per_step: float
    """Predicted."""
    reason: str


@dataclass(frozen=True)
class _Option:
    """A window and what a step's time then brings and takes, on average."""

    window: Window
    tokens: float = 1.0
    nodes: float = 0.0
    given: bool = False
    """Not ours to choose, fair or not."""

    def fair(self, least: float) -> bool:
        """Whether it gives so many tokens."""
        return self.given or self.tokens >= least

    def gain(self, price: float) -> float:
        return self.tokens - price * self.nodes


@dataclass(frozen=True)
class _Balance:
    """Everybody's window at one price."""

    price: float
    chosen: tuple[_Option, ...]
    step_s: float

    @classmethod
    def of(cls, price: float, chosen: Sequence[_Option], view: VerifierView) -> _Balance:
        return cls(price, tuple(chosen), view.step_s(sum(option.nodes for option in chosen)))

    @property
    def nodes(self) -> float:
        return sum(option.nodes for option in self.chosen)

    @property
    def goodput(self) -> float:
        return sum(option.tokens for option in self.chosen) / self.step_s

    def node_price(self, view: VerifierView) -> float:
        """Commits that the time of one node more is worth, at most 1."""
        return min(1.0, self.goodput * max(0.0, view.step_s(self.nodes + 1.0) - self.step_s))

    @property
    def slowest(self) -> float:
        """Tokens per second of the slowest session."""
        return min((option.tokens for option in self.chosen if not option.given), default=math.inf) / self.step_s


_STREAMING = _Option(Window(0, 0))


def decide(view: VerifierView, tolerance: float = TOLERANCE) -> Mapping[str, Decision]:
    """Session id -> what it shall do from now on.

    tolerance: by which share of streaming's speed a session may be slower; 1 asks for goodput alone.
    """
    if not view.sessions:
        return {}
    plain_s = view.step_s(0)
    balance = _Balance(1.0, (_STREAMING,) * len(view.sessions), plain_s)
    for _ in range(ROUNDS):
        tables = [_options(session, balance.step_s, len(view.sessions) == 1) for session in view.sessions]
        # What is given is there anyhow: nobody shall be slower than if all that is ours to choose were streaming.
        given = sum(table[0].nodes for table in tables)
        least = (1.0 - tolerance) / view.step_s(given)
        balance = _balance(tables, view, least)
    sticking = [_kept(*each, balance.price) for each in zip(view.sessions, tables, balance.chosen, strict=True)]
    kept = _Balance.of(balance.price, sticking, view)
    if kept.slowest >= least:
        balance = kept
    price = balance.node_price(view)
    decided = zip(view.sessions, balance.chosen, tables, strict=True)
    return {
        session.session_id: Decision(
            option.window,
            price,
            option.tokens * plain_s / balance.step_s,
            option.tokens,
            _reason(session, option, table, plain_s, balance.step_s),
        )
        for session, option, table in decided
    }


def _options(session: SessionView, step_s: float, alone: bool) -> list[_Option]:
    """Streaming first. step_s: of the steps that the session shares."""
    bounds, pinned = session.bounds, session.bounds.pinned
    if session.as_it_is is not None and pinned is None:
        return [_Option(_STREAMING.window, *session.as_it_is, given=True)]
    # Only ratios matter to a replay. In steps of a twelfth they are the same for many, and from one second to the next.
    rtt, draft = _rounded(session.rtt_s / step_s), _rounded(session.draft_s / step_s)
    answer = rtt + 2.0 * draft
    near = min(SLACK * answer, NEAR) if answer <= NEAR else 0.0
    if pinned is not None:
        patience = near if bounds.patience_s is None else bounds.patience_s / step_s
        tokens, nodes = 1.0, float(pinned.k)
        if session.drafts:
            tokens, nodes = _per_step(session.verdicts, rtt, draft, pinned.k, pinned.depth, patience)
        window = replace(pinned, patience_s=patience * step_s)
        return [_Option(window, tokens, nodes * pinned.nodes_per_level, given=True)]
    if not session.drafts:
        return [_STREAMING]
    ahead = math.ceil(rtt) + SPARE
    options = [_STREAMING]
    for k in K:
        if k <= min(bounds.k, bounds.depth):
            depth = min(k + ahead, bounds.depth)
            # In a batch nothing is gained by patience but where all have to wait: the others' step goes on, and to sit
            # it out would save one row. So it is granted there, and not counted on.
            for patience in dict.fromkeys((0.0, near) if alone else (0.0,)):
                tokens, nodes = _per_step(session.verdicts, rtt, draft, k, depth, patience)
                # A step that was waited for began later; tokens are per step of the usual length.
                window = Window(depth, k, (patience if alone else near) * step_s, session.nodes_per_level)
                options.append(_Option(window, tokens, nodes * session.nodes_per_level))
    return options


def _rounded(ratio: float) -> float:
    if ratio == math.inf:
        return ratio
    return math.exp2(round(8.0 * math.log2(ratio)) / 8.0) if ratio > 1e-4 else 0.0


@functools.lru_cache(maxsize=1 << 16)
def _per_step(verdicts: bytes, rtt: float, draft: float, k: int, depth: int, patience: float) -> tuple[float, float]:
    """(tokens, levels evaluated) per length of a step; times in steps."""
    speed = replay(verdicts, Way(rtt, draft, _unit), Window(depth, k, patience))
    return speed.tokens / speed.seconds, speed.nodes / speed.seconds


def _unit(nodes: int) -> float:
    return 1.0


def _balance(tables: Sequence[Sequence[_Option]], view: VerifierView, least: float) -> _Balance:
    """The greatest goodput with which nobody gets fewer tokens per second than `least`.

    By the length of the step: it says which windows keep a session fast enough, and how many nodes there may be.
    """
    best = _Balance.of(PRICES[-1], [table[0] for table in tables], view)
    for nodes in _totals(sum(max(option.nodes for option in table) for table in tables)):
        per_step = least * view.step_s(nodes)
        fair = [[option for option in table if option.fair(per_step)] for table in tables]
        if not all(fair):
            break  # a longer step would ask still more of everybody
        balance = _within(nodes, fair, view)
        if balance.nodes <= nodes and balance.goodput > best.goodput:
            best = balance
    return _polished(best, tables, view, least)


def _totals(most: float) -> Iterator[float]:
    """Numbers of nodes to try, up to the one that brings everybody's window to its widest."""
    nodes = 0.5
    while nodes < most:
        yield nodes
        nodes *= FINER
    yield most


def _within(nodes: float, tables: Sequence[Sequence[_Option]], view: VerifierView) -> _Balance:
    """The windows at the lowest price at which they take no more nodes; at the highest one they may still."""
    low, high = 0, len(PRICES) - 1
    while low < high:
        middle = (low + high) // 2
        if _at_price(PRICES[middle], tables, view).nodes <= nodes:
            high = middle
        else:
            low = middle + 1
    return _filled(nodes, _at_price(PRICES[low], tables, view), tables, view)


def _filled(nodes: float, balance: _Balance, tables: Sequence[Sequence[_Option]], view: VerifierView) -> _Balance:
    """What is left of the nodes, since a price takes or leaves a window whole, goes to whom it gives most."""
    chosen, spare = list(balance.chosen), nodes - balance.nodes
    while spare > 0.0:
        more = [
            (option.tokens - chosen[i].tokens, i, option)
            for i, table in enumerate(tables)
            for option in table
            if option.tokens > chosen[i].tokens and option.nodes <= chosen[i].nodes + spare
        ]
        if not more:
            break
        _, i, option = max(more, key=lambda gained: gained[0])
        spare -= option.nodes - chosen[i].nodes
        chosen[i] = option
    return _Balance.of(balance.price, chosen, view)


def _at_price(price: float, tables: Sequence[Sequence[_Option]], view: VerifierView) -> _Balance:
    return _Balance.of(price, [max(table, key=lambda option: option.gain(price)) for table in tables], view)


def _polished(best: _Balance, tables: Sequence[Sequence[_Option]], view: VerifierView, least: float) -> _Balance:
    """As long as one session's change makes the goodput greater, and is fair, make it."""
    for _ in range(PASSES):
        before = best
        for i, table in enumerate(tables):
            for option in table:
                changed = _Balance.of(best.price, (*best.chosen[:i], option, *best.chosen[i + 1 :]), view)
                if changed.goodput > best.goodput * (1.0 + 1e-9) and changed.slowest >= least:
                    best = changed
        if best is before:
            break
    return best


def _kept(session: SessionView, table: Sequence[_Option], best: _Option, price: float) -> _Option:
    """The session's window as it is, where no other is much better."""
    if session.current is None:
        return best
    same = [
        option
        for option in table
        if option.window.k == session.current.k and bool(option.window.patience_s) == bool(session.current.patience_s)
    ]
    return next((o for o in same if o.gain(price) >= best.gain(price) - STICK * best.tokens), best)


def _reason(session: SessionView, option: _Option, table: Sequence[_Option], plain_s: float, step_s: float) -> str:
    if session.bounds.pinned is not None:
        return "pinned by the operator"
    if not session.drafts:
        return "its device drafts nothing"
    if option.window.k == 0:
        best = max(table[1:], key=lambda other: other.tokens, default=None)
        tried = f"; the most that any window gives is {best.tokens:.2f} tokens a step" if best else ""
        return f"no window pays{tried}"
    return (
        f"{option.tokens:.2f} tokens a step for {option.nodes:.1f} nodes at RTT {1e3 * session.rtt_s:.0f} ms,"
        f" step {1e3 * step_s:.0f} ms ({1e3 * plain_s:.0f} plain)"
    )
