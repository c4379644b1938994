"""Write, read, merge and expire the segments of a traffic log: small files that are merged later.

    log/2026-11-22/20261122T101500.250000-verifier-1-3fa9c1d2-000001.parquet

A segment is named after the time of its first passage, its writer, and a number. It exists whole or not at all, and
is only ever replaced as a whole. Merging writes the merged segment first, and then deletes its sources: if that is
interrupted passages are there twice, and readers take each once. A merged segment remembers its sources, so that the
next round finds what an interrupted one left, and what two that merged at once both wrote.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import logging
import math
import re
import secrets
import time
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

import pyarrow as pa

from cloud_verifier.traffic import schema
from cloud_verifier.traffic.passage import Passage
from cloud_verifier.traffic.schema import Unreadable
from cloud_verifier.traffic.store import SegmentStore, StoredFile

log = logging.getLogger(__name__)

LONGEST_S = 2 * 86_400.0
"""The most seconds from a segment's first passage to its last: a day and what one write may span."""
UNREADABLE_S = 30 * 86_400.0
"""Age at which a segment that cannot be read is deleted, since it holds users' text: this, or the age that any readable
segment here may reach, if that is more."""
MERGED_BYTES = 32 << 20
"""The most bytes of a merged segment; a segment of a quarter of it is not small."""
SUMMARY_COLUMNS = "time_unix", "expires_unix"
"""The columns that a summary is computed from."""
_NAME = re.compile(r"(\d{8}T\d{6}\.\d{6})-[^/]+\.parquet")
_STAMP = "%Y%m%dT%H%M%S.%f"
_Key = tuple[float, str, int]


@dataclass(frozen=True)
class SegmentSummary:
    """Facts of a segment that was read, so that it need not be read again. Times are seconds since 1970."""

    last_unix: float
    """When its newest passage was produced."""
    first_expiry: float
    last_expiry: float
    sources: frozenset[str]
    """Marks of the segments that it was merged from, directly or over several merges."""

    @classmethod
    def of(cls, table: Any) -> SegmentSummary:
        """Summarise a segment's table, of which SUMMARY_COLUMNS suffice."""
        times, expiries = (table.column(name).to_numpy() for name in SUMMARY_COLUMNS)
        sources = schema.sources_of(table)
        if not len(times):
            return cls(-math.inf, -math.inf, -math.inf, sources)
        return cls(float(times.max()), float(expiries.min()), float(expiries.max()), sources)


class _Gone(Exception):
    """A segment that was listed does not exist any more; the argument is its path."""


class SegmentWriter:
    """Writes one verifier's passages, several as one segment. Not thread-safe."""

    def __init__(self, url: str, *, verifier_id: str = "verifier") -> None:
        """Open `url`, a directory or a URL for fsspec. Raises ImportError, OSError, ValueError as SegmentStore does."""
        self._store = SegmentStore(url)
        self._who = f"{re.sub(r'[^A-Za-z0-9._-]', '_', verifier_id)}-{secrets.token_hex(4)}"
        self._numbers = itertools.count(1)
        self._passages: list[Passage] = []
        self.pending = 0
        """Tokens that are not written yet."""

    def add(self, passage: Passage) -> None:
        """Take a passage, for the next `flush` to write."""
        self._passages.append(passage)
        self.pending += len(passage)

    def flush(self) -> None:
        """Write all that is pending as one segment. Raises OSError; it stays pending then, for another try."""
        if self._passages:
            first = min(passage.time_unix for passage in self._passages)
            name = _name(first, f"{self._who}-{next(self._numbers):06d}")
            self._store.put(name, schema.to_bytes(schema.table_of(self._passages)))
            self.drop()

    def drop(self) -> int:
        """Forget all that is pending; return how many tokens that were."""
        dropped, self.pending = self.pending, 0
        self._passages.clear()
        return dropped


class SegmentLog:
    """Reads and tidies the segments at one place, from any number of writers."""

    def __init__(self, url: str) -> None:
        """Open the place. Raises ImportError, OSError or ValueError as SegmentStore does."""
        self._store = SegmentStore(url)
        self._warned: set[str] = set()
        self._summaries: dict[StoredFile, SegmentSummary | None] = {}
        """Summaries of all segments that were read and still exist; None for one that cannot be read."""

    def read(self, since_unix: float = 0.0, now: float | None = None, *, whole: bool = True) -> Iterator[Passage]:
        """Yield passages by time, each once, without those that have expired by `now` (None: the present).

        since_unix: time of the first one; a segment that was once found to end before is not opened again. whole: False
        for passages without the target's distributions (their K is 0) and prompts, which costs a fraction. What cannot
        be read is left out, with a warning. Other processes may write, merge and expire meanwhile.
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
                gone.add(error.args[0])  # merged or deleted since it was listed: what is left is in other files

    def compact(self, now: float | None = None, at_least: int = 2) -> int:
        """Merge segments of each day that hold the same passages, and small ones if there are `at_least` so many,
        without their expired rows. Return how many segments were merged."""
        now = time.time() if now is None else now
        merged = 0
        for _, files in groupby(self._segments(), key=lambda segment: segment.folder):
            day = list(files)
            for same in _overlapping_groups(day, {segment: self._summary(segment) for segment in day}):
                merged += self._merge(same, now)
                day = [segment for segment in day if segment not in same]
            for sources in _small_groups(day):
                if len(sources) >= at_least:
                    merged += self._merge(sources, now)
        return merged

    def expire(self, now: float | None = None) -> int:
        """Delete all expired rows, and unreadable segments once they are old; return how many segments were deleted or
        became smaller."""
        now = time.time() if now is None else now
        self._store.sweep()
        summaries = {segment: self._summary(segment) for segment in self._segments()}
        kept = [summary.last_expiry - _first_unix(segment) for segment, summary in summaries.items() if summary]
        longest_s = max(UNREADABLE_S, *kept) if kept else UNREADABLE_S
        return sum(self._expire(segment, summary, now, longest_s) for segment, summary in summaries.items())

    def shrink(self, max_bytes: int) -> int:
        """Delete the oldest segments while all together have more bytes; return how many were deleted."""
        segments = self._segments()
        size, deleted = sum(segment.size for segment in segments), 0
        for segment in segments:
            if size <= max_bytes:
                break
            self._store.delete(segment.path)
            size -= segment.size
            deleted += 1
        return deleted

    def _by_time(self, since: float, now: float, whole: bool, gone: Collection[str]) -> Iterator[Passage]:
        """Yield all segments' passages by time, opening each when its first passage's turn comes. Raises _Gone."""
        segments = (segment for segment in self._segments() if segment.path not in gone)
        waiting = deque(segment for segment in segments if self._may_reach(segment, since))
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

    def _may_reach(self, segment: StoredFile, since: float) -> bool:
        """Return whether a segment may have passages as late as `since`."""
        summary = self._summaries.get(segment)
        return summary.last_unix >= since if summary else _first_unix(segment) >= since - LONGEST_S

    def _passages(self, segment: StoredFile, since: float, now: float, whole: bool) -> Iterator[Passage]:
        """Yield the passages of one segment by time, as far as it can be read. Raises _Gone."""
        try:
            table = self._table(segment, None if whole else schema.LIGHT)
        except FileNotFoundError:
            raise _Gone(segment.path) from None
        if table is None:
            return
        try:
            yield from schema.passages_of(schema.sorted_unique(schema.unexpired(table, now, since)))
        except Unreadable as error:
            self._warn(segment, error)

    def _merge(self, sources: Sequence[StoredFile], now: float) -> int:
        """Merge segments into one; return how many were merged."""
        tables, merged = [], []
        marks: set[str] = set()
        for segment in sources:
            try:
                table = self._table(segment)
            except FileNotFoundError:
                continue  # another process has merged it
            if table is not None:
                tables.append(table)
                merged.append(segment)
                marks |= {_mark(segment), *schema.sources_of(table)}
        if len(merged) < 2:
            return 0
        rows = schema.sorted_unique(schema.unexpired(pa.concat_tables(tables), now))
        if rows.num_rows:
            first = rows.column("time_unix")[0].as_py()
            name = _name(first, f"merged-{secrets.token_hex(4)}")
            self._store.put(name, schema.to_bytes(schema.merged_from(rows, marks)))
        for segment in merged:
            self._store.delete(segment.path)
        return len(merged)

    def _expire(self, segment: StoredFile, summary: SegmentSummary | None, now: float, longest_s: float) -> bool:
        """Delete a segment's expired rows, or all of it; return whether anything was. longest_s: the age from which on
        an unreadable segment is deleted."""
        if summary is None:
            if _first_unix(segment) + longest_s > now:
                return False
            log.warning("%s is deleted: it cannot be read, and is too old to be kept", segment.path)
            self._store.delete(segment.path)
        elif summary.first_expiry > now:
            return False
        elif summary.last_expiry <= now:
            self._store.delete(segment.path)
        else:
            try:
                table = self._table(segment)
            except FileNotFoundError:
                return False
            if table is not None:
                self._store.put(segment.path, schema.to_bytes(schema.unexpired(table, now)))
        return True

    def _summary(self, segment: StoredFile) -> SegmentSummary | None:
        """Return a segment's summary; None if it cannot be read, or does not exist any more."""
        if segment not in self._summaries:
            try:
                self._table(segment, SUMMARY_COLUMNS)
            except FileNotFoundError:
                return None
        return self._summaries[segment]

    def _table(self, segment: StoredFile, columns: Sequence[str] | None = None) -> Any:
        """Return a segment's table; None, with a warning, if it cannot be read. Raises FileNotFoundError.

        columns: LIGHT, SUMMARY_COLUMNS, or None for all.
        """
        data = self._store.read(segment.path)
        try:
            table = schema.from_bytes(data, columns)
        except Unreadable as error:
            self._warn(segment, error)
            self._summaries.setdefault(segment, None)
            return None
        self._summaries[segment] = SegmentSummary.of(table)
        return table

    def _segments(self) -> list[StoredFile]:
        """Return all segments by the time of their first passages; other files are left out with a warning."""
        files = self._store.files()
        self._summaries = {file: self._summaries[file] for file in files if file in self._summaries}
        for file in files:
            if _NAME.fullmatch(file.name) is None:
                self._warn(file, "its name is not that of a segment")
        return sorted((file for file in files if _NAME.fullmatch(file.name)), key=lambda file: (file.name, file.path))

    def _warn(self, segment: StoredFile, why: object) -> None:
        """Log a warning about a file, once."""
        if segment.path not in self._warned:
            self._warned.add(segment.path)
            log.warning("%s is left out of the traffic log: %s", segment.path, why)


def _name(first_unix: float, who: str) -> str:
    moment = datetime.fromtimestamp(math.floor(first_unix * 1e6) / 1e6, UTC)
    return f"{moment:%Y-%m-%d}/{moment.strftime(_STAMP)}-{who}.parquet"


def _first_unix(segment: StoredFile) -> float:
    """Return a time that is no later than the segment's first passage, in seconds since 1970."""
    stamp = segment.name.partition("-")[0]
    return datetime.strptime(stamp, _STAMP).replace(tzinfo=UTC).timestamp() - 1e-5


def _mark(segment: StoredFile) -> str:
    """Return a short name that no other segment has."""
    return hashlib.sha256(segment.path.encode()).hexdigest()[:16]


def _overlapping_groups(
    day: Sequence[StoredFile], summaries: Mapping[StoredFile, SegmentSummary | None]
) -> list[list[StoredFile]]:
    """Return groups of segments that hold the same passages: a merged segment with those that it was merged from, and
    with another that was merged from some of them."""
    groups: list[tuple[set[str], list[StoredFile]]] = []
    for segment in day:
        summary = summaries[segment]
        marks, members = {_mark(segment), *(summary.sources if summary else ())}, [segment]
        for group in [group for group in groups if not marks.isdisjoint(group[0])]:
            groups.remove(group)
            marks |= group[0]
            members += group[1]
        groups.append((marks, members))
    return [members for _, members in groups if len(members) > 1]


def _small_groups(day: Sequence[StoredFile]) -> Iterator[list[StoredFile]]:
    """Yield the small segments in order, in groups of no more bytes than a merged segment may have."""
    group: list[StoredFile] = []
    size = 0
    for segment in (segment for segment in day if segment.size < MERGED_BYTES // 4):
        if group and size + segment.size > MERGED_BYTES:
            yield group
            group, size = [], 0
        group.append(segment)
        size += segment.size
    if group:
        yield group
