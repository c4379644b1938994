"""The traffic log's files: small ones as they are written, merged later, gone when they have expired.

    log/2026-11-22/20261122T101500.250000-verifier-1-3fa9c1d2-000001.parquet

A segment is named after the moment of its first passage, who wrote it, and a number. It is there whole or not at all,
and only ever replaced as a whole. Merging writes the merged segment first and deletes its sources then: where that is
interrupted passages are there twice, and readers take each once. A merged segment remembers its sources, so that the
next round finds what an interrupted one left, and what two that merged at once both wrote.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

import pyarrow as pa

from cloud_verifier.traffic import schema
from cloud_verifier.traffic.merging import FACTS, Facts, doubled, mark, small_groups
from cloud_verifier.traffic.passage import Passage
from cloud_verifier.traffic.schema import Unreadable
from cloud_verifier.traffic.store import Found, Store

log = logging.getLogger(__name__)

LONGEST_S = 2 * 86_400.0
"""From a segment's first passage to its last one, at most: a day and what one write may span."""
UNREADABLE_S = 30 * 86_400.0
"""A segment that cannot be read holds somebody's text: it goes when it is so old, or as old as any that can be read
here may become, if that is more."""
_NAME = re.compile(r"(\d{8}T\d{6}\.\d{6})-[^/]+\.parquet")
_STAMP = "%Y%m%dT%H%M%S.%f"
_Key = tuple[float, str, int]


class _Gone(Exception):
    """A segment that was listed is not there any more."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.path = path


class SegmentWriter:
    """Writes one verifier's passages, some at a time. Not thread-safe."""

    def __init__(
        self,
        url: str,
        *,
        verifier_id: str = "verifier",
        flush_tokens: int = 16_384,
        flush_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """flush_tokens, flush_s: `add` writes when so many tokens have gathered, or the first has waited so long."""
        self._store = Store(url)
        self._who = f"{re.sub(r'[^A-Za-z0-9._-]', '_', verifier_id)}-{secrets.token_hex(4)}"
        self._numbers = itertools.count(1)
        self._flush_tokens = flush_tokens
        self._flush_s = flush_s
        self._clock = clock
        self._due = math.inf
        self._passages: list[Passage] = []
        self.pending = 0
        """Tokens that are not yet written."""

    def __enter__(self) -> SegmentWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, passage: Passage) -> None:
        """Take a passage, and write all if it is time. Raises OSError as `flush` does."""
        if not self._passages:
            self._due = self._clock() + self._flush_s
        self._passages.append(passage)
        self.pending += len(passage)
        if self.pending >= self._flush_tokens or self._clock() >= self._due:
            self.flush()

    def flush(self) -> None:
        """Write what has gathered. Raises OSError, and then it is there still, for another try."""
        if self._passages:
            first = min(passage.time_unix for passage in self._passages)
            name = _name(first, f"{self._who}-{next(self._numbers):06d}")
            self._store.put(name, schema.to_bytes(schema.table_of(self._passages)))
            self.drop()

    def drop(self) -> int:
        """Forget what has gathered; how many tokens that were."""
        dropped, self.pending = self.pending, 0
        self._passages.clear()
        return dropped

    def close(self) -> None:
        self.flush()


class SegmentLog:
    """All segments at one place, whoever wrote them."""

    def __init__(self, url: str) -> None:
        """Raises ImportError, OSError or ValueError where there is no such place (see Store)."""
        self._store = Store(url)
        self._warned: set[str] = set()
        self._facts: dict[Found, Facts | None] = {}
        """Of all that were read and are there still; None of what cannot be read."""

    def read(self, since_unix: float = 0.0, now: float | None = None, *, whole: bool = True) -> Iterator[Passage]:
        """Passages by time, each once, without those that have expired by `now`, which is the present.

        since_unix: of the first one; a segment that was once found to end before is not opened again. whole: False for
        passages without the target's distributions (their K is 0) and prompts, which costs a fraction. What cannot be
        read is left out, with a warning. Other processes may write, merge and expire meanwhile.
        """
        last: _Key = (-math.inf, "", -1)
        gone: set[str] = set()
        while True:
            try:
                for passage in self._by_time(since_unix, time.time() if now is None else now, whole, gone):
                    if passage.key > last:
                        last = passage.key
                        yield passage
                return
            except _Gone as error:
                gone.add(error.path)  # merged or deleted since it was listed: what is left is in other files

    def compact(self, now: float | None = None, at_least: int = 2) -> int:
        """Merge the small segments of each day, where there are so many, without their expired rows, and whichever hold
        the same passages; how many went."""
        now = time.time() if now is None else now
        gone = 0
        for _, files in groupby(self._segments(), key=lambda found: found.folder):
            day = list(files)
            for same in doubled(day, {found: self._known(found) for found in day}):
                gone += self._merge(same, now)
                day = [found for found in day if found not in same]
            for sources in small_groups(day):
                if len(sources) >= at_least:
                    gone += self._merge(sources, now)
        return gone

    def expire(self, now: float | None = None) -> int:
        """Delete all rows whose time has come, and what cannot be read once it is old; how many segments went, or
        became smaller."""
        now = time.time() if now is None else now
        self._store.sweep()
        facts = {found: self._known(found) for found in self._segments()}
        kept = [known.last_expiry - _first_unix(found) for found, known in facts.items() if known]
        longest_s = max(UNREADABLE_S, *kept) if kept else UNREADABLE_S
        return sum(self._expire(found, known, now, longest_s) for found, known in facts.items())

    def shrink(self, most_bytes: int) -> int:
        """Delete the oldest segments while all together are larger; how many went."""
        segments = self._segments()
        size, gone = sum(found.size for found in segments), 0
        for found in segments:
            if size <= most_bytes:
                break
            self._store.delete(found.path)
            size -= found.size
            gone += 1
        return gone

    def _by_time(self, since: float, now: float, whole: bool, gone: Collection[str]) -> Iterator[Passage]:
        """Merged over segments; one is opened when its first passage's turn comes. Raises _Gone."""
        segments = (found for found in self._segments() if found.path not in gone)
        waiting = deque(found for found in segments if self._may_reach(found, since))
        heap: list[tuple[_Key, int, Passage, Iterator[Passage]]] = []
        numbers = itertools.count()

        def push(rest: Iterator[Passage]) -> None:
            passage = next(rest, None)
            if passage is not None:
                heapq.heappush(heap, (passage.key, next(numbers), passage, rest))

        while waiting or heap:
            if waiting and (not heap or _first_unix(waiting[0]) <= heap[0][0][0]):
                push(self._passages(waiting.popleft(), since, now, whole))
                continue
            _, _, passage, rest = heapq.heappop(heap)
            yield passage
            push(rest)

    def _may_reach(self, found: Found, since: float) -> bool:
        """Whether it may have passages of so late."""
        known = self._facts.get(found)
        return known.last_unix >= since if known else _first_unix(found) >= since - LONGEST_S

    def _passages(self, found: Found, since: float, now: float, whole: bool) -> Iterator[Passage]:
        """Of one segment, by time; as far as it can be read. Raises _Gone."""
        try:
            table = self._table(found, None if whole else schema.LIGHT)
        except FileNotFoundError:
            raise _Gone(found.path) from None
        if table is None:
            return
        try:
            yield from schema.passages_of(schema.sorted_once(schema.unexpired(table, now, since)))
        except Unreadable as error:
            self._warn(found, error)

    def _merge(self, sources: Sequence[Found], now: float) -> int:
        """Several segments into one; how many went."""
        tables, merged = [], []
        marks: set[str] = set()
        for found in sources:
            try:
                table = self._table(found)
            except FileNotFoundError:
                continue  # somebody else has merged it
            if table is not None:
                tables.append(table)
                merged.append(found)
                marks |= {mark(found), *schema.sources_of(table)}
        if len(merged) < 2:
            return 0
        rows = schema.sorted_once(schema.unexpired(pa.concat_tables(tables), now))
        if rows.num_rows:
            first = rows.column("time_unix")[0].as_py()
            name = _name(first, f"merged-{secrets.token_hex(4)}")
            self._store.put(name, schema.to_bytes(schema.merged_from(rows, marks)))
        for found in merged:
            self._store.delete(found.path)
        return len(merged)

    def _expire(self, found: Found, known: Facts | None, now: float, longest_s: float) -> bool:
        """longest_s: after which nothing here can be of use."""
        if known is None:
            if _first_unix(found) + longest_s > now:
                return False
            log.warning("%s is deleted: nobody could read it, and it is too old to be kept", found.path)
            self._store.delete(found.path)
        elif known.first_expiry > now:
            return False
        elif known.last_expiry <= now:
            self._store.delete(found.path)
        else:
            try:
                table = self._table(found)
            except FileNotFoundError:
                return False
            if table is not None:
                self._store.put(found.path, schema.to_bytes(schema.unexpired(table, now)))
        return True

    def _known(self, found: Found) -> Facts | None:
        """None where it cannot be read, or is not there any more."""
        if found not in self._facts:
            try:
                self._table(found, FACTS)
            except FileNotFoundError:
                return None
        return self._facts[found]

    def _table(self, found: Found, columns: Sequence[str] | None = None) -> Any:
        """None, and a warning, where it cannot be read. columns: all, LIGHT, or FACTS. Raises FileNotFoundError."""
        data = self._store.read(found.path)
        try:
            table = schema.from_bytes(data, columns)
        except Unreadable as error:
            self._warn(found, error)
            self._facts.setdefault(found, None)
            return None
        self._facts[found] = Facts.of(table)
        return table

    def _segments(self) -> list[Found]:
        """By the time of their first passages; whatever else lies there is warned of."""
        found = self._store.found()
        there = set(found)
        self._facts = {one: known for one, known in self._facts.items() if one in there}
        for one in found:
            if _NAME.fullmatch(one.name) is None:
                self._warn(one, "its name is not that of a segment")
        return sorted((one for one in found if _NAME.fullmatch(one.name)), key=lambda one: (one.name, one.path))

    def _warn(self, found: Found, why: object) -> None:
        """Once of each file."""
        if found.path not in self._warned:
            self._warned.add(found.path)
            log.warning("%s is left out of the traffic log: %s", found.path, why)


def _name(first_unix: float, who: str) -> str:
    moment = datetime.fromtimestamp(math.floor(first_unix * 1e6) / 1e6, UTC)
    return f"{moment:%Y-%m-%d}/{moment.strftime(_STAMP)}-{who}.parquet"


def _first_unix(found: Found) -> float:
    """No later than its first passage."""
    stamp = found.name.partition("-")[0]
    return datetime.strptime(stamp, _STAMP).replace(tzinfo=UTC).timestamp() - 1e-5
