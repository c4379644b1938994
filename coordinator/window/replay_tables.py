"""Predict what every window brings each of many sessions, by the streaming model, as arrays over all of them.

The model is streaming.replay with steps of length 1. Its replays are not repeated for each history. After a position
whose first proposal was not accepted a device starts afresh from the target's token, and until the next such position
everything hangs on the times alone. So one table for each pair of times, of runs that are broken after 0, 1, 2 ...
accepted first proposals, serves the histories of all sessions, which are walked from one broken run to the next.

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
_LEVEL, _IN_TIME = 1 << 8, 1 << 20
"""A table's entry holds steps, evaluated levels and proposals in time in one integer, so that one sum adds up all
three: over LONGEST positions at most 192 steps of at most 16 levels."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class RunTables:
    """Keeps the tables of the pairs of times that were used last, for all sessions of a process; threads may share it.

    lengths: the windows' speculation lengths k, at most 16.
    """

    def __init__(self, lengths: Sequence[int], kept: int = TABLES) -> None:
        self._lengths: Final = np.array(lengths)
        self._kept = kept
        self._tables: dict[tuple[float, float, int, int], NDArray[np.int32]] = {}
        self._lock = threading.Lock()

    def per_window(
        self, histories: Sequence[bytes], rtt: Floats, draft: Floats, ahead: Ints, deepest: Ints
    ) -> tuple[Ints, Ints]:
        """Return (steps, evaluated levels) `[sessions, windows]` of the replays of these histories.

        histories: at most LONGEST outcomes each. rtt, draft: `[sessions]`, in steps. ahead, deepest: `[sessions]`; the
        window of length k has the depth k + ahead, or deepest if that is less.
        """
        keys = list(zip(rtt.tolist(), draft.tolist(), ahead.tolist(), deepest.tolist(), strict=True))
        with self._lock:
            tables = self._of(keys)
        return _walked(tables, histories)

    def _of(self, keys: Sequence[tuple[float, float, int, int]]) -> NDArray[np.int32]:
        """Return the tables `[keys, 2, windows, LONGEST + 1]`."""
        found = {key: table for key in keys if (table := self._tables.pop(key, None)) is not None}
        missing = [key for key in dict.fromkeys(keys) if key not in found]
        if missing:
            rtt, draft, ahead, deepest = (np.array(column)[:, None] for column in zip(*missing, strict=True))
            depth = np.minimum(self._lengths + ahead, deepest)
            found |= zip(missing, _run_tables(rtt, draft, self._lengths, depth), strict=True)
        self._tables |= found  # the last used are the last to go
        for key in list(self._tables)[: -self._kept]:
            del self._tables[key]
        return np.stack([found[key] for key in keys])


def replay_all(
    histories: Sequence[bytes],
    rtt: ArrayLike,
    draft: ArrayLike,
    k: ArrayLike,
    depth: ArrayLike,
    wait: ArrayLike = 0.0,
    server_gain: ArrayLike = 0.0,
) -> tuple[Floats, Ints, Ints]:
    """Return (lengths of a step, steps, evaluated levels) `[sessions, windows]` of streaming.replay with these windows.

    The arguments after the histories broadcast to that shape; times are in steps.
    """
    count = len(histories)
    arguments = np.broadcast_arrays(rtt, draft, k, depth, wait, server_gain, np.empty((count, 1)))[:-1]
    shape = arguments[0].shape
    outcomes = np.repeat(_matrix(histories, HIT).T, shape[1], axis=1)
    ends = np.repeat([len(history) for history in histories], shape[1])
    passed = _Passage(outcomes, *(argument.ravel() for argument in arguments), np.zeros(len(ends)))
    lanes = np.arange(len(ends))
    seconds, steps, levels = (
        each[ends, lanes].reshape(shape) for each in (passed.seconds, passed.steps, passed.levels)
    )
    return seconds, steps.astype(np.int64), levels.astype(np.int64)


class _Passage:
    """Follows lanes, each with a history and a window, through all positions. Arrays are `[positions + 1, lanes]`.

    seconds, steps and levels are what a history that ended before a position would have taken so far. received: when
    the device knows the token before the first position.
    """

    def __init__(
        self,
        outcomes: NDArray[np.uint8],
        rtt: Floats,
        draft: Floats,
        k: Ints,
        depth: Ints,
        wait: Floats,
        server_gain: Floats,
        received: Floats,
    ) -> None:
        positions, lanes = outcomes.shape
        self.seconds, self.steps, self.levels, self.levels_if_broken = np.zeros((4, positions + 1, lanes))
        self.in_time = np.zeros((positions + 1, lanes), dtype=bool)
        hits, misses = outcomes == HIT, outcomes == MISS
        half, widest = rtt / 2.0, np.minimum(k, depth)
        waits, gains = (wait > 0.0) & (rtt <= wait) & (k > 0), bool(server_gain.any())
        # A device without drafting time has drafted all levels below a proposal at once.
        at_once, per_level = np.where(draft > 0.0, 0.0, np.inf), np.where(draft > 0.0, draft, 1.0)
        deepest = int(depth.max())
        known = np.full((deepest + positions, lanes), np.inf)
        """C[p - deepest], 0 before the first position."""
        known[:deepest] = 0.0
        limits = known.ravel()
        limit = (deepest - depth).astype(np.int64) * lanes + np.arange(lanes)
        now, steps, levels, taken, owed = np.zeros((5, lanes))
        drafted = np.full(lanes, np.inf)
        unbroken, begins = np.ones((2, lanes), dtype=bool)
        committed_by_server = np.zeros(lanes)
        for position in range(positions):
            self.seconds[position], self.steps[position] = now + ~begins, steps + ~begins
            np.add(levels, taken, out=self.levels[position])
            drafted = np.maximum(np.minimum(drafted, received), limits.take(limit)) + draft
            limit += lanes
            arrival = drafted + half
            if waits.any():
                now = np.where(begins & waits, np.maximum(now, np.minimum(arrival, now + wait)), now)
            if gains:
                owed += begins * server_gain
                whole = begins * np.floor(owed)
                owed -= whole
                committed_by_server += begins * (position + whole - committed_by_server)
            there = unbroken & (arrival <= now) & (taken < k)
            below = np.floor(taken + 1.0 + (now - arrival) / per_level + at_once)
            broken = levels + np.where(there, np.minimum(widest, below), taken)
            self.in_time[position], self.levels_if_broken[position] = there, broken
            accepted = there & ~misses[position]
            goes_on = accepted & hits[position]
            np.copyto(levels, broken, where=unbroken & ~goes_on)
            taken = (taken + 1.0) * goes_on
            received = known[deepest + position] = now + 1.0 + half
            begins = ~accepted
            if gains:
                begins &= committed_by_server <= position
            now, steps = now + begins, steps + begins
            unbroken = goes_on | begins
            drafted[~hits[position]] = np.inf
        self.seconds[-1], self.steps[-1], self.levels[-1] = now + ~begins, steps + ~begins, levels + taken


def _run_tables(rtt: Floats, draft: Floats, k: Ints, depth: Ints) -> NDArray[np.int32]:
    """Return `[pairs, 4, windows, LONGEST + 1]`: of runs broken after so many accepted first proposals, then of runs
    with which the history ends; then both of a history's first run, whose device starts with the first step.

    rtt, draft: `[pairs, 1]`, in steps; k, depth: `[pairs, windows]`.
    """
    arguments = [each.ravel() for each in np.broadcast_arrays(rtt, draft, k, depth, 0.0, 0.0)]
    outcomes = np.full((LONGEST + 1, depth.size), HIT, dtype=np.uint8)
    tables = np.empty((depth.shape[0], 4, depth.shape[1], LONGEST + 1), dtype=np.int32)
    for kind, start in ((0, arguments[0] / 2.0), (2, np.zeros(depth.size))):
        run = _Passage(outcomes, *arguments, start)
        broken = run.steps[1:] + _LEVEL * run.levels_if_broken[:-1] + _IN_TIME * run.in_time[:-1]
        ended = run.steps[:-1] + _LEVEL * run.levels[:-1]
        for each in (broken, ended):
            tables[:, kind] = each.T.reshape(*depth.shape, -1)
            kind += 1
    return tables


def _walked(tables: NDArray[np.int32], histories: Sequence[bytes]) -> tuple[Ints, Ints]:
    """Return (steps, evaluated levels) `[sessions, windows]`. tables: of each session's times."""
    count, kinds, windows, runs = tables.shape
    outcomes = _matrix(histories, HIT)
    # Two more places: a history may end behind an accepted sibling, whose step commits one token more.
    places = outcomes.shape[1] + 2
    place = np.arange(places)
    ends = np.array([len(history) for history in histories])[:, None]
    breaks = np.full((count, places), places)
    breaks[:, :-2][outcomes != HIT] = np.nonzero(outcomes != HIT)[1]
    breaks = np.minimum(np.minimum.accumulate(breaks[:, ::-1], axis=1)[:, ::-1], np.maximum(ends, place))
    # By place of a run's begin: its entry in a table, where the next run begins, and whether that may be one later.
    last = breaks >= ends
    entry = (breaks - place + windows * runs * last).ravel()
    first = np.arange(count)[:, None] * places
    following = (first + breaks + ~last).ravel()
    padded = np.pad(outcomes, ((0, 0), (0, 2)), constant_values=HIT)
    sibling = (np.take_along_axis(padded, breaks, axis=1) == SIBLING).ravel()
    at = np.repeat(first.ravel(), windows)
    table = (np.arange(count)[:, None] * kinds * windows + np.arange(windows)).ravel() * runs
    flat, total = tables.ravel(), np.zeros(len(at), dtype=np.int64)
    found = flat.take(table + 2 * windows * runs + entry.take(at))
    while True:
        total += found
        following_at = following.take(at) + (found >= _IN_TIME) * sibling.take(at)
        if np.array_equal(at, following_at):
            break
        at = following_at
        found = flat.take(table + entry.take(at))
    total = total.reshape(count, windows)
    return total % _LEVEL, total % _IN_TIME // _LEVEL


def _matrix(histories: Sequence[bytes], padding: int) -> NDArray[np.uint8]:
    """Return the outcomes `[sessions, positions]`, shorter histories padded at their ends."""
    longest = max(map(len, histories))
    padded = b"".join(history.ljust(longest, bytes([padding])) for history in histories)
    return np.frombuffer(padded, dtype=np.uint8).reshape(len(histories), longest)
