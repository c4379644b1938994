"""Which segments of a day to merge: those that are small, and those that hold the same passages."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cloud_verifier.traffic import schema
from cloud_verifier.traffic.store import Found

MERGED_BYTES = 32 << 20
"""Of a merged segment, at most; one of a quarter of it is left alone."""
FACTS = "time_unix", "expires_unix"
"""Columns that tell them."""


@dataclass(frozen=True)
class Facts:
    """Of one segment, so that it need not be read again."""

    last_unix: float
    """Of its newest passage."""
    first_expiry: float
    last_expiry: float
    sources: frozenset[str]
    """Marks of the segments that it was merged from, and of what those were merged from."""

    @classmethod
    def of(cls, table: Any) -> Facts:
        times, expiries = (table.column(name).to_numpy() for name in FACTS)
        sources = schema.sources_of(table)
        if not len(times):
            return cls(-math.inf, -math.inf, -math.inf, sources)
        return cls(float(times.max()), float(expiries.min()), float(expiries.max()), sources)


def mark(found: Found) -> str:
    """Short, and of this segment alone."""
    return hashlib.sha256(found.path.encode()).hexdigest()[:16]


def doubled(day: Sequence[Found], facts: Mapping[Found, Facts | None]) -> list[list[Found]]:
    """Those that belong together, since they hold passages from the same sources: a merged segment with what it was
    merged from, and with another that was merged from some of that."""
    groups: list[tuple[set[str], list[Found]]] = []
    for found in day:
        known = facts[found]
        if known is None or not known.sources:
            continue
        marks, members = {mark(found), *known.sources}, [found]
        for other in [group for group in groups if not marks.isdisjoint(group[0])]:
            groups.remove(other)
            marks |= other[0]
            members += other[1]
        groups.append((marks, members))
    group_of = {one: members for marks, members in groups for one in marks}
    for found in day:
        members = group_of.get(mark(found), [found])
        if found not in members:
            members.append(found)
    return [members for _, members in groups if len(members) > 1]


def small_groups(day: Sequence[Found]) -> Iterator[list[Found]]:
    """The small ones in order, each group with no more bytes than a merged segment may have."""
    group: list[Found] = []
    size = 0
    for found in (found for found in day if found.size < MERGED_BYTES // 4):
        if group and size + found.size > MERGED_BYTES:
            yield group
            group, size = [], 0
        group.append(found)
        size += found.size
    if group:
        yield group
