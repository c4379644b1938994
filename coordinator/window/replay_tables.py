"""Predict what every window brings each of many sessions, by replaying their acceptance histories as arrays.

Matches are not independent of one another (a geometric law overstates how deep they run), so nothing is drawn: the
recorded outcomes are replayed once, in their order. With an unbroken spine of first proposals and siblings beside it,
all of the protocol that matters for speed is when the proposal for position p

    is drafted    F[p] = min(F[p-1] if the proposal before was accepted, C[p-1]) + draft, not before C[p - depth]
    arrives       A[p] = F[p] + rtt / 2

and C[p], when the token of position p reaches the device: a step that begins at T, and takes 1, commits on while
A[p] <= T and the outcome is no miss, at most k proposals, then one token of the target's own, which reaches the device
rtt / 2 after the step's end. An accepted sibling is committed like a first proposal, but nothing was drafted below it.
The verifier's own nodes are there in every step, at any distance: each step commits so many tokens more as was measured
on average, whole ones as the mean adds up.

These replays are not repeated for each history. After a position whose first proposal was not accepted a device starts
afresh from the target's token, and until the next such position everything hangs on the times alone. So one table for
each pair of times, of runs that are broken after 0, 1, 2 ... accepted first proposals, serves the histories of all
sessions, which are walked from one broken run to the next.

Where a run does not start afresh, since the verifier adds tokens of its own at other times, or where the verifier waits
for drafts, `replay_all` replays the histories themselves, all at once, position by position.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from outrider.core.acceptance.history import HIT, MISS, SIBLING

LONGEST = 192
"""Longest history that is walked in tables; as many outcomes as a session is judged by."""
TABLES = 2048
"""Tables that are kept, of 24 KB each; times are rounded, so that 10,000 sessions need about as many."""
CHUNK = 256
"""Sessions that are walked at once."""
_LEVEL, _IN_TIME = 1 << 8, 1 << 20
"""A table's entry holds steps, evaluated levels and proposals in time in one integer, so that one sum adds up all
three: over LONGEST positions at most 192 steps of at most 16 levels."""

Times = tuple[float, float, int, int]
"""Round trip and drafting time in steps, levels that the device is ahead beyond a step's, and the deepest window."""
Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class RunTables:
    """Keeps the tables of the pairs of times that were used last, for all sessions of a process; threads may share it.

    lengths: the windows' speculation lengths k, at most 16. kept: number of tables, at least 2 * CHUNK.
    """

    def __init__(self, lengths: Sequence[int], kept: int = TABLES) -> None:
        self._lengths: Final = np.array(lengths)
        self._tables = np.empty((kept, 4, len(lengths), LONGEST + 1), dtype=np.int32)
        self._places: dict[Times, int] = {}
        """Places of tables, that used last at the end."""
        self._lock = threading.Lock()

    def per_window(
        self, histories: Sequence[bytes], rtt: Floats, draft: Floats, ahead: Ints, deepest: Ints
    ) -> tuple[Ints, Ints]:
        """Return (steps, evaluated levels) `[sessions, windows]` of the replays of these histories.

        histories: at most LONGEST outcomes each. rtt, draft: `[sessions]`, in steps. ahead, deepest: `[sessions]`; the
        window of length k has the depth k + ahead, or deepest if that is less.
        """
        times = list(zip(rtt.tolist(), draft.tolist(), ahead.tolist(), deepest.tolist(), strict=True))
        found = []
        with self._lock:
            for i in range(0, len(times), CHUNK):
                places = self._places_of(times[i : i + CHUNK])
                found.append(_walked(self._tables, places, histories[i : i + CHUNK]))
        steps, levels = (np.concatenate(each) for each in zip(*found, strict=True))
        return steps, levels

    def _places_of(self, times: Sequence[Times]) -> Ints:
        """Return where the tables of these times stand, after those that are missing have been made."""
        missing = [each for each in dict.fromkeys(times) if each not in self._places]
        for each in times:
            if (place := self._places.pop(each, None)) is not None:
                self._places[each] = place
        if missing:
            rtt, draft, ahead, deepest = (np.array(column)[:, None] for column in zip(*missing, strict=True))
            made = _run_tables(rtt, draft, self._lengths, np.minimum(self._lengths + ahead, deepest))
            for each, table in zip(missing, made, strict=True):
                full = len(self._places) == len(self._tables)
                place = self._places.pop(next(iter(self._places))) if full else len(self._places)
                self._places[each], self._tables[place] = place, table
        return np.array([self._places[each] for each in times])


def replay_all(
    histories: Sequence[bytes],
    rtt: ArrayLike,
    draft: ArrayLike,
    k: ArrayLike,
    depth: ArrayLike,
    wait: ArrayLike = 0.0,
    server_gain: ArrayLike = 0.0,
) -> tuple[Floats, Ints, Ints]:
    """Return (lengths of a step, steps, evaluated levels) `[sessions, windows]` of replays with these windows.

    The arguments after the histories broadcast to that shape; times are in steps.
    """
    arguments = np.broadcast_arrays(rtt, draft, k, depth, wait, server_gain, np.empty((len(histories), 1)))[:-1]
    shape = arguments[0].shape
    rtt, draft, k, depth, wait, server_gain = (argument.ravel() for argument in arguments)
    outcomes = np.repeat(_matrix(histories, HIT).T, shape[1], axis=1)
    hits, misses = outcomes == HIT, outcomes == MISS
    afresh = np.where(hits, 0.0, np.inf)
    positions, lanes = outcomes.shape
    known, before = _known(depth, positions)
    half, waits, gains = rtt / 2.0, (wait > 0.0) & (rtt <= wait) & (k > 0), bool(server_gain.any())
    waiting = bool(waits.any())
    begun, arrivals, taken, steps = np.zeros((4, positions + 1, lanes))
    there, unbroken = np.ones((2, positions + 1, lanes), dtype=bool)
    owed, by_server = np.zeros((2, lanes))
    drafted, received, begins = np.full(lanes, np.inf), np.zeros(lanes), np.ones(lanes, dtype=bool)
    for position in range(positions):
        now, arrival = begun[position], arrivals[position]
        np.minimum(drafted, received, out=drafted)
        np.maximum(drafted, known[position:].take(before), out=drafted)
        drafted += draft
        np.add(drafted, half, out=arrival)
        if waiting:
            np.copyto(now, np.maximum(now, np.minimum(arrival, now + wait)), where=begins & waits)
        if gains:
            owed += begins * server_gain
            np.copyto(by_server, position + np.floor(owed), where=begins)
            owed -= begins * np.floor(owed)
        in_time = np.logical_and(arrival <= now, taken[position] < k, out=there[position])
        in_time &= unbroken[position]
        goes_on = in_time & hits[position]
        np.multiply(taken[position] + 1.0, goes_on, out=taken[position + 1])
        received = np.add(now, 1.0 + half, out=known[position - positions])
        np.add(steps[position], begins, out=steps[position + 1])
        begins = ~in_time | misses[position]
        if gains:
            begins &= by_server <= position
        np.add(now, begins, out=begun[position + 1])
        np.logical_or(goes_on, begins, out=unbroken[position + 1])
        drafted += afresh[position]
    evaluated = _levels(there[:-1], taken[:-1], begun[:-1] - arrivals[:-1], draft, np.minimum(k, depth))
    evaluated *= unbroken[:-1] & ~(there[:-1] & hits)  # where the spine of accepted first proposals ends
    levels = taken + np.pad(evaluated.cumsum(axis=0), ((1, 0), (0, 0)))
    ends, lane = np.array([len(history) for history in histories]).repeat(shape[1]), np.arange(lanes)
    taken_s, counted, levels = (
        each.reshape(shape) for each in (begun[ends - 1, lane] + 1.0, steps[ends, lane], levels[ends, lane])
    )
    return taken_s, counted.astype(np.int64), levels.astype(np.int64)


def _run_tables(rtt: Floats, draft: Floats, k: Ints, depth: Ints) -> NDArray[np.int32]:
    """Return `[pairs, 4, windows, LONGEST + 1]`: of runs broken after so many accepted first proposals, then of runs
    with which the history ends; then both of a history's first run, whose device starts with the first step.

    rtt, draft: `[pairs, 1]`, in steps; k: `[windows]`; depth: `[pairs, windows]`.
    """
    shape = 2, *depth.shape
    rtt, draft = (np.broadcast_to(each, shape).ravel() for each in (rtt, draft))
    k, depth = (np.broadcast_to(each, shape).ravel() for each in (k, depth))
    positions, half = LONGEST + 1, rtt / 2.0
    known, before = _known(depth, positions)
    begun, arrivals, taken = np.zeros((3, positions + 1, len(depth)))
    there = np.zeros((positions, len(depth)), dtype=bool)
    drafted, received = np.full(len(depth), np.inf), np.where(np.arange(len(depth)) < len(depth) // 2, half, 0.0)
    for position in range(positions):
        now, arrival, in_time = begun[position], arrivals[position], there[position]
        np.minimum(drafted, received, out=drafted)
        np.maximum(drafted, known[position:].take(before), out=drafted)
        drafted += draft
        np.add(drafted, half, out=arrival)
        np.logical_and(arrival <= now, taken[position] < k, out=in_time)
        received = known[position - positions]
        np.add(now, 1.0 + half, out=received)
        np.multiply(taken[position] + 1.0, in_time, out=taken[position + 1])
        np.add(now, ~in_time, out=begun[position + 1])
    ended_steps = np.append(np.zeros((1, len(depth))), begun[:-2] + 1.0, axis=0)
    complete = np.cumsum(taken[:-1] * ~there, axis=0) - taken[:-1] * ~there
    evaluated = _levels(there, taken[:-1], begun[:-1] - arrivals[:-1], draft, np.minimum(k, depth))
    broken = begun[:-1] + 1.0 + _LEVEL * (complete + evaluated) + _IN_TIME * there
    ended = ended_steps + _LEVEL * (complete + taken[:-1])
    tables = np.stack([broken, ended]).reshape(2, positions, *shape)  # kind, run, start, pair, window
    return np.ascontiguousarray(tables.transpose(3, 2, 0, 4, 1), dtype=np.int32).reshape(shape[1], 4, shape[2], -1)


def _known(depth: Ints, positions: int) -> tuple[Floats, Ints]:
    """Return an array `[deepest + positions, lanes]` of when the device knows the token at each position, counted from
    `deepest` before the first, and where in it, from a position on, that of `depth` positions before it stands."""
    deepest = int(depth.max())
    known = np.full((deepest + positions, len(depth)), np.inf)
    known[:deepest] = 0.0
    return known, (deepest - depth) * len(depth) + np.arange(len(depth))


def _levels(there: Bools, taken: Floats, since: Floats, draft: Floats, most: Ints) -> Floats:
    """Return the levels that a step evaluates whose spine of accepted first proposals ends: those taken, and if the
    next is there, that one and those drafted below it since."""
    # A device without drafting time has drafted all levels below a proposal at once.
    below = np.maximum(0.0, since) / np.where(draft > 0.0, draft, 1.0) + np.where(draft > 0.0, 0.0, np.inf)
    levels: Floats = np.where(there, np.minimum(most, np.floor(taken + 1.0 + below)), taken)
    return levels


def _walked(tables: NDArray[np.int32], table_of: Ints, histories: Sequence[bytes]) -> tuple[Ints, Ints]:
    """Return (steps, evaluated levels) `[sessions, windows]`. table_of: place of each session's table.

    A run begins behind every miss, whatever was there in time before. So the walks from all misses to the next go on
    side by side, and end after a few runs: those that accepted siblings end.
    """
    count, (_, kinds, windows, runs) = len(histories), tables.shape
    outcomes = np.pad(_matrix(histories, HIT), ((0, 0), (0, 2)), constant_values=HIT)
    places = outcomes.shape[1]  # two more: behind an accepted sibling a step commits one token more
    place, ends = np.arange(places), np.array([len(history) for history in histories])[:, None]
    breaks = np.where(outcomes == HIT, places - 1, place)
    breaks = np.minimum.accumulate(breaks[:, ::-1], axis=1)[:, ::-1]
    breaks = np.minimum(breaks, np.maximum(ends, place))
    # By place of a run's begin: its entry in a table, where the next run begins, and whether that may be one later.
    entry = (breaks - place + windows * runs * (breaks >= ends)).ravel()
    first = np.arange(count)[:, None] * places
    following = (first + breaks + (breaks < ends)).ravel()
    sibling = (np.take_along_axis(outcomes, breaks, axis=1) == SIBLING).ravel()
    begins = np.zeros(outcomes.shape, dtype=bool)
    begins[:, 1:] = outcomes[:, :-1] == MISS
    stops = (begins | (place >= ends)).ravel()
    begins[:, 0] = True
    at = np.flatnonzero(begins & (place < ends))
    lane = (at // places)[:, None] * windows + np.arange(windows)
    tables_at = ((table_of[:, None] * kinds * windows + np.arange(windows)) * runs).ravel()
    table = tables_at.take(lane) + (at % places == 0)[:, None] * 2 * windows * runs
    at, lane, table = np.repeat(at, windows), lane.ravel(), table.ravel()
    flat, totals = tables.ravel(), np.zeros(count * windows)
    while len(at):
        found = flat.take(table + entry.take(at))
        totals += np.bincount(lane, found, len(totals))
        at = following.take(at) + ((found >= _IN_TIME) & sibling.take(at))
        goes_on = ~stops.take(at)
        at, lane = at[goes_on], lane[goes_on]
        table = tables_at.take(lane)
    packed = totals.astype(np.int64).reshape(count, windows)
    return packed % _LEVEL, packed % _IN_TIME // _LEVEL


def _matrix(histories: Sequence[bytes], padding: int) -> NDArray[np.uint8]:
    """Return the outcomes `[sessions, positions]`, shorter histories padded at their ends."""
    longest = max(map(len, histories))
    padded = b"".join(history.ljust(longest, bytes([padding])) for history in histories)
    return np.frombuffer(padded, dtype=np.uint8).reshape(len(histories), longest)
