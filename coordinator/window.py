"""Decide how far each session of a verifier speculates, when the verifier reports.

The goal is the verifier's goodput, subject to every session being at least as fast as without speculation. What a
window brings a session is predicted by replaying its recorded outcomes (`replay`). Which windows go together is found
by one price (`choose`): a token of a step's time costs all sessions the same (as in goodput-optimal speculation, arXiv
2406.14066). There is no state and no clock.

A session is decided about once enough is known of it, or of sessions with its workload key: their outcomes count like
earlier outcomes of its own, until it has enough of its own or has shown to be different. Before that its verifier's own
directive stands, within an operator's bounds. A session that must not speculate still drafts a little, which no step
evaluates, so that it is noticed when its proposals become good again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from outrider.core.acceptance.history import HIT, MISS
from outrider.core.protocol.messages import SessionLimits
from outrider.core.step_cost import StepCost
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import session_pb2
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry, VerifierTelemetry

K = (1, 2, 3, 4, 6, 8, 12, 16)
"""Speculation lengths that are considered beside 0."""
MAX_DEPTH = 32
"""Window depth of a session without bounds."""
PRICES = np.array((0.0, *(0.01 * 1.15**i for i in range(34)), 1e9))
"""Tokens of all sessions that a node must bring; at the last price nobody speculates."""
TOLERANCE = 0.02
"""Share by which a session may be slower than without speculation: predictions are no better, and nodes are never quite
free."""
STICK = 0.03
"""A session keeps its window unless another one is better by this share of its tokens per step."""
FAIR_ROUNDS = 4
"""Rounds in which the options at each price become fair."""
FAILED = 0.1
"""First acceptance below which a draft is no longer of use."""
ROUNDS = 3
"""Windows depend on the step's length and it on them; they settle after two rounds."""
SETTLED = 0.02
"""Share of a step by which another round may still change it."""
SPARE = 2
"""Levels that a device runs further ahead than is needed on average: too far costs little, too short idles the link."""
NEAR = 0.4
"""Longest draft wait that is considered, in steps."""
SLACK = 2.0
"""Draft wait over the time in which nodes are expected: round trips vary, and nodes that arrive end the wait."""
LEAST = 24
"""Outcomes before a session is decided about."""
RECENT = 192
"""Most outcomes that a session is judged by: with fewer, one of many sessions looks worse than it is by chance, and all
of them would have to follow it."""
CHANGED = 3.5
"""Difference between the last outcomes and those before, in standard deviations, from which the earlier ones are of
another text. At 9 to 14% of the positions of recorded texts some are cut for nothing, at 1 to 2% all but 24."""
LAST = np.arange(176, 15, -8)
"""Numbers of last outcomes that are compared, the longest first, which counts of those that differ as much. A draft
with an acceptance of 0.6 that fails is noticed within 32 outcomes, and within 16 if it recovers."""
SILENT = 64
"""Tokens without an outcome after which a device is taken to draft nothing."""
PROBE_DEPTH = 2
"""Levels that a device drafts ahead if no node is to be verified."""
PROBE_PER_LEVEL = 2.0
"""Nodes of such a level."""
UNSHOWN_DRAFT_MS = 5.0
"""Drafting time of a device whose verifier never waited for it, so that its own is not known; at most half a step."""
UNKNOWN = pb.Window(k=6, depth=24, draft_wait_ms=0.0, nodes_per_level=1.0)
"""The widest window of a session that has bounds, and of which too little is known."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
StepSeconds = Callable[[ArrayLike], Floats]
"""Nodes of all sessions together `[n]` -> seconds of a step `[n]`."""


@dataclass(frozen=True)
class View:
    """A session as it is judged."""

    telemetry: SessionTelemetry
    history: bytes
    """The outcomes that count; none of a device that drafts nothing."""
    draft_ms: float
    widest: pb.Window
    """The widest window that operator and ticket allow, or the one that an operator has pinned."""
    pinned: bool = False
    bounded: bool = False
    """Whether an operator has set bounds."""
    known: bool = True
    """Whether enough is known to decide about it, or that it drafts nothing."""
    by_prior: bool = False
    """Whether that is so by its prior alone."""
    current: pb.Window | None = None
    """The window that was decided last; None in a new epoch."""

    @property
    def given(self) -> bool:
        """Return whether it goes on as it does, fair or not."""
        return self.pinned or not self.known

    @property
    def decided(self) -> bool:
        """Return whether its window is decided by the measurements."""
        return not self.given and (bool(self.history) or self.current is not None)


@dataclass(frozen=True)
class Options:
    """Holds what each window brings each session, as arrays `[sessions, options]`, no speculation first.

    Tokens and nodes are per length of a step, on average; tokens are -inf where a session has no such option. A session
    whose window is given has it in every option.
    """

    k: Ints
    depth: Ints
    wait_ms: Floats
    """Draft waits that are granted."""
    tokens: Floats
    nodes: Floats
    tokens_per_step: Floats
    """A step may have waited, which these leave out."""
    given: Bools
    """`[sessions]`: whether a session's window is given, fair or not."""

    def of(self, chosen: Ints) -> tuple[Floats, Floats]:
        """Return tokens and nodes `[..., sessions]` of these options `[..., sessions]`."""
        rows = np.arange(len(self.given))
        return self.tokens[rows, chosen], self.nodes[rows, chosen]


def decide(
    verifier: VerifierTelemetry,
    sessions: Sequence[SessionTelemetry],
    before: Mapping[str, pb.WindowDecision],
    bounds: Mapping[str, pb.WindowBounds],
    limits: SessionLimits,
    priors: Mapping[str, SessionTelemetry],
) -> dict[str, pb.WindowDecision]:
    """Return the windows of a verifier's sessions by session id, of those that are decided about.

    before: the last decisions. bounds: by session id; those of "" are for all others. limits: of all of them.
    priors: by session id, of sessions with too few outcomes of their own, what was measured of sessions with the same
    workload key: outcomes, and the usual time and nodes of a level.
    """
    if not verifier.step_cost_ms or not sessions:
        return {}
    cost = StepCost({rows: ms / 1e3 for rows, ms in verifier.step_cost_ms.items()}, verifier.session_cost_ms / 1e3)
    between_s, count = verifier.timing_ms.get("between", 0.0) / 1e3, len(sessions)

    def step_s(nodes: ArrayLike) -> Floats:
        return between_s + cost.curve(count + np.asarray(nodes), count)

    plain_s = float(step_s(0.0))
    views = _views(sessions, before, bounds, limits, priors, 500.0 * plain_s)
    predicted_ms = max((decision.step_ms for decision in before.values()), default=0.0)
    decisions = decide_together(views, step_s, (predicted_ms or verifier.step_ms) / 1e3 or plain_s)
    return {decision.session_id: decision for decision in decisions}


def decide_together(views: Sequence[View], step_s: StepSeconds, length_s: float) -> list[pb.WindowDecision]:
    """Return the windows of these sessions, but for those that their verifier decides. length_s: of a step as it is, or
    as it was predicted."""
    for _ in range(ROUNDS):
        options = predict(views, length_s)
        chosen, price = choose(options, step_s)
        before_s, length_s = length_s, float(step_s(options.of(chosen)[1].sum()))
        if abs(length_s - before_s) < SETTLED * before_s:
            break
    chosen = _kept(views, options, chosen, price, step_s)
    return list(_decisions(views, options, chosen, step_s))


def directive(decision: pb.WindowDecision, limits: SessionLimits) -> session_pb2.Directive:
    """Return the directive for the session's verifier and device."""
    window = decision.window
    per_level = window.nodes_per_level if window.k else PROBE_PER_LEVEL
    return session_pb2.Directive(
        window_nodes=min(limits.nodes, math.ceil(window.depth * per_level)),
        window_depth=min(limits.depth, window.depth),
        nodes_per_step=min(limits.nodes, math.ceil(decision.max_k * per_level)),
        min_acceptance=decision.min_acceptance if window.k else 0.0,
        draft_wait_ms=math.ceil(window.draft_wait_ms),
    )


def wants_prior(session: SessionTelemetry) -> bool:
    """Return whether the session has fewer outcomes than it is judged by, and is not known to draft nothing."""
    return len(session.acceptance_history) < RECENT and not _drafts_nothing(session)


def latest(histories: Sequence[bytes]) -> list[bytes]:
    """Return the last outcomes of each session, as far back as they are of one text: how well a draft does changes
    with it.

    Cut where the end differs most from the beginning, much as in adaptive windowing (Bifet and Gavalda, 2007).
    """
    kept = np.array([min(RECENT, len(history)) for history in histories])
    hit = _matrix([history[-RECENT:][::-1] for history in histories], MISS, RECENT) == HIT
    hits = np.pad(hit.cumsum(axis=1), ((0, 0), (1, 0)))  # of so many last outcomes
    rows = np.flatnonzero(kept)
    while len(rows):
        all_hits, last_hits = hits[rows, kept[rows]][:, None], hits[rows][:, LAST]
        earlier = np.maximum(kept[rows, None] - LAST, 1)
        mean = all_hits / kept[rows, None]
        deviation = np.sqrt(mean * (1.0 - mean) * (1.0 / earlier + 1.0 / LAST))
        difference = np.abs((all_hits - last_hits) / earlier - last_hits / LAST)
        tells = (earlier >= LAST[-1]) & (deviation > 0.0)
        deviations = np.divide(difference, deviation, out=np.zeros(tells.shape), where=tells)
        cut = deviations.max(axis=1) > CHANGED
        rows = rows[cut]
        kept[rows] = LAST[deviations[cut].argmax(axis=1)]
    return [history[len(history) - last :] for history, last in zip(histories, kept.tolist(), strict=True)]


def predict(views: Sequence[View], length_s: float) -> Options:
    """Return what windows bring in steps of this length."""
    alone = len(views) == 1
    lengths = np.array((0, *K, *K) if alone else (0, *K))
    waited = np.arange(len(lengths)) > len(K)
    shape = len(views), len(lengths)
    pinned, given, replayed = np.array(
        [(v.pinned, v.given, bool(v.history) and (v.pinned or v.known)) for v in views]
    ).T
    own_waits_ms = [v.widest.draft_wait_ms if v.widest.HasField("draft_wait_ms") else math.nan for v in views]
    step_ms = 1e3 * length_s
    rtt, draft = np.array([(v.telemetry.rtt_ms, v.draft_ms) for v in views]).T[..., None] / step_ms
    own_wait_ms = np.array(own_waits_ms)[:, None]
    most, deepest, per_level, gain = np.array(
        [(v.widest.k, v.widest.depth, v.widest.nodes_per_level, v.telemetry.server_gain) for v in views]
    ).T[..., None]
    answer = rtt + 2.0 * draft
    near_ms = step_ms * np.where(answer <= NEAR, np.minimum(SLACK * answer, NEAR), 0.0)
    fixed = pinned[:, None]
    k = np.where(fixed, most, lengths).astype(np.int64)
    depth = np.where(fixed, deepest, np.minimum(lengths + np.ceil(rtt) + SPARE, deepest)).astype(np.int64)
    # In a batch nothing is gained by waiting but where all have to wait: the others' step goes on, and to sit it out
    # would save one row. So the wait is granted there, and not counted on. What it costs and saves where the verifier
    # has nodes of its own, only its engine knows.
    wait_ms = np.where(fixed, np.where(np.isnan(own_wait_ms), near_ms, own_wait_ms), near_ms * waited)
    granted_ms = np.where(fixed | (alone & (gain == 0.0)), wait_ms, near_ms * (lengths > 0))
    tokens, nodes = np.full(shape, 1.0) + gain, np.zeros(shape)
    tokens_per_step = tokens.copy()
    for row in np.flatnonzero(given & ~pinned).tolist():
        told = views[row].telemetry
        tokens[row] = tokens_per_step[row] = max(1.0, told.committed / max(1, told.steps))
        nodes[row] = told.evaluated / max(1, told.steps)
    if (rows := np.flatnonzero(replayed)).size:
        histories = [views[row].history for row in rows.tolist()]
        found = replay(histories, *(each[rows] for each in (rtt, draft, k, depth, wait_ms / step_ms, gain)))
        outcomes = np.array([[len(history)] for history in histories])
        tokens[rows], nodes[rows] = outcomes / found.lengths, per_level[rows] * found.levels / found.lengths
        tokens_per_step[rows] = outcomes / found.steps
    exists = (lengths == 0) | given[:, None] | (replayed[:, None] & (lengths <= np.minimum(most, deepest)))
    return Options(k, depth, granted_ms, np.where(exists, tokens, -np.inf), nodes, tokens_per_step, given)


def choose(options: Options, step_s: StepSeconds) -> tuple[Ints, float]:
    """Return the option of each session with which the verifier commits most, and the price at which they are best.

        maximise  sum E_i / t(sum n_i)   subject to   E_i / t(sum n_i) >= least   for each session that has a choice

    At the maximum a session's option maximises E_i - price * n_i, with one price for all. A longer step asks more of a
    fair option, and that may make it longer still: so the options at each price are found anew until the step is as
    long as was assumed.
    """
    least = least_rate(options, step_s)
    worth = options.tokens - PRICES[:, None, None] * options.nodes
    lengths_s = np.full(len(PRICES), float(step_s(options.nodes[options.given, 0].sum())))
    for _ in range(FAIR_ROUNDS):
        fair = options.given[:, None] | (options.tokens >= least * lengths_s[:, None, None])
        chosen = np.where(fair, worth, -np.inf).argmax(axis=2)
        tokens, nodes = options.of(chosen)
        before_s, lengths_s = lengths_s, step_s(nodes.sum(axis=1))
        if np.array_equal(before_s, lengths_s):
            break
    slowest = tokens[:, ~options.given].min(axis=1, initial=np.inf)
    goodput = np.where(slowest >= least * lengths_s, tokens.sum(axis=1) / lengths_s, -np.inf)
    best = int(goodput.argmax()) if goodput.max() > -np.inf else len(PRICES) - 1
    return chosen[best], min(1.0, float(PRICES[best]))


def least_rate(options: Options, step_s: StepSeconds) -> float:
    """Return the tokens per second that a session must have: those without speculation, less the tolerance.

    What is given is there in any case, so that it counts on both sides.
    """
    return (1.0 - TOLERANCE) / float(step_s(options.nodes[options.given, 0].sum()))


class Replayed(NamedTuple):
    """Holds what comes of replays, as arrays `[sessions, options]`."""

    lengths: Floats
    """Time, in steps."""
    steps: Floats
    levels: Floats
    """Levels that all steps evaluate."""


def replay(
    histories: Sequence[bytes],
    rtt: ArrayLike,
    draft: ArrayLike,
    k: ArrayLike,
    depth: ArrayLike,
    wait: ArrayLike = 0.0,
    server_gain: ArrayLike = 0.0,
) -> Replayed:
    """Replay the recorded outcomes of all sessions in their order, position by position, with each of these windows.

    Matches are not independent of one another (a geometric law overstates how deep they run), so nothing is drawn. With
    an unbroken spine of first proposals and siblings beside it, all of the protocol that matters for speed is when the
    proposal for position p

        is drafted    F[p] = min(F[p-1] if the proposal before was accepted, C[p-1]) + draft, not before C[p - depth]
        arrives       A[p] = F[p] + rtt / 2

    and C[p], when the token of position p reaches the device: a step that begins at T, and takes 1, commits on while
    A[p] <= T and the outcome is no miss, at most k proposals, then one token of the target's own, which reaches the
    device rtt / 2 after the step's end. An accepted sibling is committed like a first proposal, but nothing was drafted
    below it. The verifier's own nodes are there in every step, at any distance: each step commits so many tokens more
    as was measured on average, whole ones as the mean adds up.

    The arguments after the histories broadcast to `[sessions, options]`; times are in steps.
    """
    arguments = np.broadcast_arrays(rtt, draft, k, depth, wait, server_gain, np.empty((len(histories), 1)))[:-1]
    shape = arguments[0].shape
    rtt, draft, k, depth, wait, server_gain = (argument.ravel() for argument in arguments)
    outcomes = np.repeat(_matrix(histories, HIT).T, shape[1], axis=1)
    hits, misses = outcomes == HIT, outcomes == MISS
    afresh = np.where(hits, 0.0, np.inf)
    positions, lanes = outcomes.shape
    # When the device knows each position's token, counted from the deepest window before the first position on.
    deepest = int(depth.max())
    known = np.full((deepest + positions, lanes), np.inf)
    known[:deepest] = 0.0
    window_before = (deepest - depth) * lanes + np.arange(lanes)
    half, to_device, least_draft = rtt / 2.0, 1.0 + rtt / 2.0, np.maximum(draft, 1e-9)
    waits, gains = (wait > 0.0) & (rtt <= wait) & (k > 0), bool(server_gain.any())
    waiting, most = bool(waits.any()), np.minimum(k, depth)
    first = np.where(draft > 0.0, 1.0, 1e3)  # without drafting time all levels are drafted at once
    counts = [len(history) for history in histories]
    history_lengths = {*counts}
    ends = np.repeat(counts, shape[1])
    lengths, all_steps, all_levels = np.zeros((3, lanes))
    now, steps = np.zeros((2, lanes))
    taken, evaluated, owed, by_server, received = np.zeros((5, lanes))
    begins, unbroken = np.ones((2, lanes), dtype=bool)
    drafted = np.full(lanes, np.inf)
    for position in range(positions):
        np.minimum(drafted, received, out=drafted)
        np.maximum(drafted, known[position:].take(window_before), out=drafted)
        drafted += draft
        arrival = drafted + half
        if waiting:
            np.copyto(now, np.maximum(now, np.minimum(arrival, now + wait)), where=begins & waits)
        if gains:
            owed += begins * server_gain
            np.copyto(by_server, position + np.floor(owed), where=begins)
            owed -= begins * np.floor(owed)
        in_time = (arrival <= now) & (taken < k)
        committed = in_time & unbroken
        goes_on = committed & hits[position]
        # Where the spine of accepted first proposals ends, a step evaluates the levels taken, and if the next is there,
        # that one and those drafted below it since.
        drafted_since = np.floor(taken + first + (now - arrival) / least_draft)
        step_levels = np.where(in_time, np.minimum(most, drafted_since), taken)
        evaluated += step_levels * (unbroken & ~goes_on)
        steps += begins
        received = np.add(now, to_device, out=known[deepest + position])
        begins = ~committed | misses[position]
        if gains:
            begins &= by_server <= position
        taken = (taken + 1.0) * goes_on
        if position + 1 in history_lengths:
            last = ends == position + 1
            np.copyto(lengths, now + 1.0, where=last)
            np.copyto(all_steps, steps, where=last)
            np.copyto(all_levels, evaluated + taken, where=last)
        now += begins
        unbroken = goes_on | begins
        drafted += afresh[position]
    return Replayed(*(each.reshape(shape) for each in (lengths, all_steps, all_levels)))


def _matrix(histories: Sequence[bytes], padding: int, width: int = 0) -> NDArray[np.uint8]:
    """Return the outcomes `[sessions, positions]`, shorter histories padded at their ends."""
    width = width or max(map(len, histories))
    padded = b"".join(history.ljust(width, bytes([padding])) for history in histories)
    return np.frombuffer(padded, dtype=np.uint8).reshape(len(histories), width)


def _drafts_nothing(session: SessionTelemetry) -> bool:
    return not session.acceptance_history and session.committed >= SILENT


def _views(
    sessions: Sequence[SessionTelemetry],
    before: Mapping[str, pb.WindowDecision],
    bounds: Mapping[str, pb.WindowBounds],
    limits: SessionLimits,
    priors: Mapping[str, SessionTelemetry],
    half_step_ms: float,
) -> list[View]:
    """Return the sessions as they are judged. half_step_ms: half of a step without speculation."""
    none = SessionTelemetry()
    known = {name: prior for name, prior in priors.items() if len(prior.acceptance_history) >= LEAST}
    found = [known.get(session.session_id, none) if wants_prior(session) else none for session in sessions]
    # A prior has the session's own outcomes in it already.
    histories = [
        prior.acceptance_history[: max(0, len(prior.acceptance_history) - len(session.acceptance_history))]
        + session.acceptance_history
        for session, prior in zip(sessions, found, strict=True)
    ]
    views = []
    for session, prior, history, judged in zip(sessions, found, histories, latest(histories), strict=True):
        allowed, last = bounds.get(session.session_id) or bounds.get(""), before.get(session.session_id)
        enough = len(history) >= LEAST
        per_level = max(1.0, session.nodes_per_level or prior.nodes_per_level)
        views.append(
            View(
                session,
                judged,
                session.draft_ms or prior.draft_ms or min(UNSHOWN_DRAFT_MS, half_step_ms),
                _widest(allowed, limits, per_level),
                pinned=allowed is not None and allowed.pinned,
                bounded=allowed is not None,
                known=_drafts_nothing(session) or (enough and session.rtt_ms > 0.0),
                by_prior=enough and len(session.acceptance_history) < LEAST,
                current=last.window if last is not None and last.epoch == session.epoch else None,
            )
        )
    return views


def _widest(allowed: pb.WindowBounds | None, limits: SessionLimits, per_level: float) -> pb.Window:
    """Return the widest window that the operator and the tickets allow together."""
    window = pb.Window(k=K[-1], depth=MAX_DEPTH, nodes_per_level=per_level)
    if allowed is not None:
        window.MergeFrom(allowed.window)
        window.k, window.depth = allowed.window.k, allowed.window.depth
    window.depth = min(window.depth, MAX_DEPTH, limits.depth, int(limits.nodes / window.nodes_per_level))
    window.k = min(window.k, window.depth, K[-1] if allowed is None or not allowed.pinned else window.depth)
    return window


def _kept(views: Sequence[View], options: Options, chosen: Ints, price: float, step_s: StepSeconds) -> Ints:
    """Return the options that are the sessions' present windows, unless the best is much better, if that is fair.

    No speculation takes the place of a draft that has failed in any case: it may be hardly better, where nodes cost
    next to nothing.
    """
    rows = np.arange(len(views))
    current = [view.current or pb.Window() for view in views]
    k, waits = np.array([(window.k, window.draft_wait_ms > 0.0) for window in current]).T[..., None]
    known = np.array([view.current is not None for view in views])[:, None]
    failed = np.array([view.history.count(HIT) < FAILED * len(view.history) for view in views])
    worth = options.tokens - price * options.nodes
    enough = (worth[rows, chosen] - STICK * options.tokens[rows, chosen])[:, None]
    same = known & (options.k == k) & ((options.wait_ms > 0.0) == waits) & (worth >= enough)
    keeps = same.any(axis=1) & ((options.k[rows, chosen] > 0) | ~failed)
    kept = np.where(keeps, same.argmax(axis=1), chosen)
    tokens, nodes = options.of(kept)
    least = least_rate(options, step_s) * float(step_s(nodes.sum()))
    return kept if tokens[~options.given].min(initial=np.inf) >= least else chosen


def _decisions(
    views: Sequence[View], options: Options, chosen: Ints, step_s: StepSeconds
) -> Iterator[pb.WindowDecision]:
    """Yield the decisions, of the sessions that are decided about."""
    rows, (tokens, nodes) = np.arange(len(views)), options.of(chosen)
    in_all = float(nodes.sum())
    length_s, longer_s, plain_s = (float(step_s(count)) for count in (in_all, in_all + 1.0, 0.0))
    min_acceptance = min(1.0, float(tokens.sum()) / length_s * max(0.0, longer_s - length_s))
    steps = f"step {1e3 * length_s:.0f} ms ({1e3 * plain_s:.0f} plain)"
    of_each = options.k, options.depth, options.wait_ms, options.tokens, options.tokens_per_step, options.nodes
    figures = zip(*(each[rows, chosen].tolist() for each in of_each), options.tokens[:, 1:].max(axis=1), strict=True)
    for view, (k, depth, wait_ms, tokens, tokens_per_step, nodes, most) in zip(views, figures, strict=True):
        widest, max_k = view.widest, k
        if view.pinned:
            reason = "pinned by the operator"
        elif view.decided:
            reason = _reason(view, k, tokens_per_step, nodes, most, steps)
            if k and len(views) == 1:  # the verifier, which knows each node, may evaluate more where nobody else waits
                depth = min(widest.depth, depth + widest.k - k)
                max_k = min(widest.k, depth)
        elif view.bounded:
            k = max_k = min(UNKNOWN.k, widest.k)
            depth, wait_ms = min(UNKNOWN.depth, widest.depth), 0.0
            reason = "too little is known of it; the operator's bounds"
        else:
            continue
        if not k and not view.pinned:
            depth, wait_ms = min(PROBE_DEPTH, widest.depth), 0.0
        yield pb.WindowDecision(
            session_id=view.telemetry.session_id,
            epoch=view.telemetry.epoch,
            window=pb.Window(k=k, depth=depth, draft_wait_ms=wait_ms, nodes_per_level=widest.nodes_per_level),
            min_acceptance=min_acceptance,
            speedup=tokens * plain_s / length_s,
            tokens_per_step=tokens_per_step,
            reason=reason,
            rtt_ms=view.telemetry.rtt_ms,
            draft_ms=view.draft_ms,
            observations=len(view.history),
            first_acceptance=view.history.count(HIT) / max(1, len(view.history)),
            max_k=max_k,
            step_ms=1e3 * length_s,
        )


def _reason(view: View, k: int, tokens_per_step: float, nodes: float, most: float, steps: str) -> str:
    if not view.history:
        return "its device drafts nothing"
    if k == 0:
        tried = f"; the most that any window gives is {most:.2f} tokens a step" if most > 0.0 else ""
        return f"no window pays{tried}"
    prior = "by its class's prior: " if view.by_prior else ""
    rtt_ms = view.telemetry.rtt_ms
    return f"{prior}{tokens_per_step:.2f} tokens a step for {nodes:.1f} nodes at RTT {rtt_ms:.0f} ms, {steps}"
