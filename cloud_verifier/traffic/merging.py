"""Decide which segments of a day to merge: small ones, and those that hold the same passages."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cloud_verifier.traffic import schema
from cloud_verifier.traffic.store import StoredFile

MERGED_BYTES = 32 << 20
"""The most bytes of a merged segment; a segment of a quarter of it is not small."""
SUMMARY_COLUMNS = "time_unix", "expires_unix"
"""The columns that a summary is computed from."""


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


def mark(segment: StoredFile) -> str:
    """Return a short name that no other segment has."""
    return hashlib.sha256(segment.path.encode()).hexdigest()[:16]


def overlapping_groups(
    day: Sequence[StoredFile], summaries: Mapping[StoredFile, SegmentSummary | None]
) -> list[list[StoredFile]]:
    """Return groups of segments that hold the same passages: a merged segment with those that it was merged from, and
    with another that was merged from some of them."""
    groups: list[tuple[set[str], list[StoredFile]]] = []
    for segment in day:
        summary = summaries[segment]
        marks, members = {mark(segment), *(summary.sources if summary else ())}, [segment]
        for group in [group for group in groups if not marks.isdisjoint(group[0])]:
            groups.remove(group)
            marks |= group[0]
            members += group[1]
        groups.append((marks, members))
    return [members for _, members in groups if len(members) > 1]


def small_groups(day: Sequence[StoredFile]) -> Iterator[list[StoredFile]]:
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
