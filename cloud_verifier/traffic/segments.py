"""Keep the traffic log: Parquet files, each of one verifier process and one day (UTC).

    log/2026-11-22/1795342500250-1795342510100-1797934500250-verifier-1-3fa9c1d2-000001.parquet

The numbers in a segment's name are milliseconds since 1970: of its first passage, of its last one, and of the moment at
which the first one expires, so that nobody opens a file to learn that. A segment exists whole or not at all. Only the
process that wrote segments merges them; everybody may delete what has expired. If a process is killed between writing a
segment and deleting what it replaces, or two replace one at once, passages are there twice. Readers count each once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import math
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from fsspec.implementations.local import LocalFileSystem

from cloud_verifier.traffic.passage import Passage
from outrider.artifacts import atomic_files

log = logging.getLogger(__name__)

MANY = 16
"""Small segments of a process and a day from which on they are merged."""
MERGED_BYTES = 32 << 20
"""Bytes of small segments from which on they are merged; a segment of a quarter of it is not small."""
GIVEN_UP_S = 3_600.0
"""A writer that has not finished a file after so long never will."""
SCHEMA: Any = pa.schema(
    [
        ("session_id", pa.string()),
        ("tenant", pa.string()),
        ("traffic_class", pa.string()),
        ("draft_release", pa.string()),
        ("weights_hash", pa.string()),
        ("start", pa.int32()),
        ("tokens", pa.list_(pa.int32())),
        ("top", pa.int32()),  # K; the next two hold n * K values, row after row
        ("top_ids", pa.list_(pa.int32())),
        ("top_log_probs", pa.list_(pa.float32())),
        ("tail", pa.list_(pa.float32())),
        ("proposed_depths", pa.list_(pa.uint8())),
        ("temperature", pa.float64()),
        ("time_unix", pa.float64()),
        ("expires_unix", pa.float64()),
        ("prompt", pa.list_(pa.int32())),  # empty but where it may be kept, and start is 0
    ]
)
_HEAVY = "top", "top_ids", "top_log_probs", "tail"
"""The columns of the target's distributions, which are nearly all of a file's bytes."""
_LISTS = "tokens", "top_ids", "top_log_probs", "tail", "proposed_depths", "prompt"
_ORDER = [("time_unix", "ascending"), ("session_id", "ascending"), ("start", "ascending")]
_NAME = re.compile(r"(\d+)-(\d+)-(\d+)-([^/]+)\.parquet")


class Unreadable(ValueError):
    """The bytes are no segment, or a damaged one."""


@dataclass(frozen=True, order=True)
class Segment:
    """Names a file of the log by what its name says. Times are milliseconds since 1970."""

    first: int
    """No passage in it is older."""
    last: int
    """No passage in it is newer."""
    expires: int
    """No passage in it expires sooner."""
    writer: str
    """The process that wrote it, and a number that the process gave it."""
    size: int = 0
    """Size in bytes."""

    @classmethod
    def of(cls, table: Any, writer: str) -> Segment:
        """Name a table of at least one passage."""
        times, expiries = table.column("time_unix"), table.column("expires_unix")
        bounds = pc.min_max(times).as_py()
        first, last = math.floor(1e3 * bounds["min"]), math.ceil(1e3 * bounds["max"])
        return cls(first, last, math.floor(1e3 * pc.min(expiries).as_py()), writer)

    @property
    def day(self) -> str:
        return f"{datetime.fromtimestamp(self.first / 1e3, UTC):%Y-%m-%d}"

    @property
    def path(self) -> str:
        """Return the path below the log's root."""
        return f"{self.day}/{self.first}-{self.last}-{self.expires}-{self.writer}.parquet"


class SegmentLog:
    """Reads and tidies the segments at one place, from any number of writers."""

    def __init__(self, url: str) -> None:
        """Open `url`, a directory, which is created, or a URL for fsspec. Raises ImportError if fsspec lacks a package,
        OSError or ValueError if there is no such place."""
        self._fs, root = fsspec.core.url_to_fs(str(url))
        self._root = root.rstrip("/")
        self._local = isinstance(self._fs, LocalFileSystem)
        self._warned: set[str] = set()
        if self._local:
            os.makedirs(self._root, exist_ok=True)

    def read(self, since_unix: float = 0.0, now: float | None = None, *, whole: bool = True) -> Iterator[Passage]:
        """Yield the passages from `since_unix` on that have not expired by `now` (None: the present).

        They come segment by segment, and by time within each. whole: False for passages without the target's
        distributions (their K is 0), which costs a fraction. What cannot be read is left out, with a warning. Other
        processes may write, merge and expire meanwhile: a passage that is merged while this reads may come twice.
        """
        now = time.time() if now is None else now
        columns = None if whole else [name for name in SCHEMA.names if name not in _HEAVY]
        done: set[str] = set()
        again = True
        while again:
            again = False
            for segment in self.segments():
                if segment.path in done or segment.last < 1e3 * since_unix:
                    continue
                done.add(segment.path)
                try:
                    table = self.load(segment, columns)
                    fresh = pc.greater_equal(table.column("time_unix"), since_unix)
                    unexpired = pc.greater(table.column("expires_unix"), now)
                    yield from passages_of(table.filter(pc.and_(fresh, unexpired)))
                except FileNotFoundError:
                    again = True  # merged or deleted since it was listed: what is left of it is in another segment
                except ValueError as error:
                    self._warn(segment, error)

    def expire(self, now: float | None = None) -> int:
        """Delete all expired passages, and unreadable segments once their first passage expires; return how many
        segments were deleted or became smaller."""
        now = time.time() if now is None else now
        self._sweep()
        expired = [segment for segment in self.segments() if segment.expires <= 1e3 * now]
        return sum(self._keep(one, lambda table: pc.greater(table.column("expires_unix"), now)) for one in expired)

    def forget(self, tenant: str) -> int:
        """Delete all passages of a tenant, and unreadable segments; return how many segments were deleted or became
        smaller. What a verifier is about to write or merge comes after this."""
        return sum(
            self._keep(one, lambda table: pc.not_equal(table.column("tenant"), tenant)) for one in self.segments()
        )

    def shrink(self, max_bytes: int) -> int:
        """Delete the oldest segments while all together have more bytes; return how many were deleted."""
        segments = self.segments()
        size, deleted = sum(segment.size for segment in segments), 0
        for segment in segments:
            if size <= max_bytes:
                break
            self.delete(segment)
            size -= segment.size
            deleted += 1
        return deleted

    def segments(self) -> list[Segment]:
        """Return all segments by the time of their first passages."""
        self._fs.invalidate_cache()
        try:
            files: dict[str, dict[str, Any]] = self._fs.find(self._root, detail=True)
        except FileNotFoundError:
            return []
        found = []
        for path, about in files.items():
            if named := _NAME.fullmatch(path.rpartition("/")[2]):
                first, last, expires = map(int, named.groups()[:3])
                found.append(Segment(first, last, expires, named[4], int(about.get("size") or 0)))
        return sorted(found)

    def put(self, table: Any, writer: str) -> Segment:
        """Write a table as a segment. If the process is killed midway, nothing has changed. Raises OSError."""
        segment, data = Segment.of(table, writer), _to_bytes(table)
        target = f"{self._root}/{segment.path}"
        if self._local:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            atomic_files.write(Path(target), data)
        else:
            self._fs.pipe_file(target, data)  # object stores show an object when it is complete
        return dataclasses.replace(segment, size=len(data))

    def load(self, segment: Segment, columns: Sequence[str] | None = None) -> Any:
        """Return a segment's table, or some columns of it. Raises FileNotFoundError and Unreadable."""
        return _from_bytes(bytes(self._fs.cat_file(f"{self._root}/{segment.path}")), columns)

    def delete(self, segment: Segment) -> None:
        """Delete a segment, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._root}/{segment.path}")

    def _warn(self, segment: Segment, why: object) -> None:
        """Log a warning about a segment, once."""
        if segment.path not in self._warned:
            self._warned.add(segment.path)
            log.warning("%s is left out of the traffic log: %s", segment.path, why)

    def _keep(self, segment: Segment, mask: Callable[[Any], Any]) -> bool:
        """Keep the rows of a segment that the mask of its table selects; return whether anything was deleted."""
        try:
            table = self.load(segment)
        except FileNotFoundError:
            return False
        except Unreadable as error:
            log.warning("%s is deleted, since it may hold what must go: %s", segment.path, error)
            self.delete(segment)
            return True
        rows = table.filter(mask(table))
        if rows.num_rows == table.num_rows:
            return False
        if not rows.num_rows or self.put(rows, segment.writer).path != segment.path:
            self.delete(segment)
        return True

    def _sweep(self) -> None:
        """Delete incomplete files that killed writers have left."""
        for left in Path(self._root).rglob(f".*{atomic_files.PARTIAL}") if self._local else ():
            with contextlib.suppress(OSError):
                if left.stat().st_mtime < time.time() - GIVEN_UP_S:
                    left.unlink()


class SegmentWriter:
    """Writes one verifier's passages, several as one segment. Not thread-safe."""

    def __init__(self, url: str, *, verifier_id: str = "verifier") -> None:
        """Open `url` as SegmentLog does."""
        self._log = SegmentLog(url)
        self._process = f"{re.sub(r'[^A-Za-z0-9._-]', '_', verifier_id)}-{secrets.token_hex(4)}"
        self._numbers = itertools.count(1)
        self._passages: list[Passage] = []
        self._small: list[Segment] = []
        """Segments of the latest day that are to be merged."""
        self.pending = 0
        """Tokens that are not written yet."""

    def add(self, passage: Passage) -> None:
        """Take a passage, for the next `flush` to write."""
        self._passages.append(passage)
        self.pending += len(passage)

    def flush(self) -> None:
        """Write all that is pending as one segment, and merge small ones if they are many. Raises OSError."""
        if self._passages:
            self._wrote(self._put(table_of(self._passages)))
            self.drop()
        if len(self._small) >= MANY or sum(segment.size for segment in self._small) >= MERGED_BYTES:
            self._merge()

    def drop(self) -> int:
        """Forget all that is pending; return how many tokens that were."""
        dropped, self.pending = self.pending, 0
        self._passages.clear()
        return dropped

    def _put(self, table: Any) -> Segment:
        return self._log.put(table, f"{self._process}-{next(self._numbers):06d}")

    def _wrote(self, segment: Segment) -> None:
        self._small = [one for one in self._small if one.day == segment.day]
        if segment.size < MERGED_BYTES // 4:
            self._small.append(segment)

    def _merge(self) -> None:
        """Write the small segments as one, and then delete them."""
        sources, tables = [], []
        small, self._small = self._small, []
        for segment in small:
            with contextlib.suppress(FileNotFoundError, Unreadable):  # such as one with a passage that has expired
                tables.append(self._log.load(segment))
                sources.append(segment)
        if tables:
            self._wrote(self._put(pa.concat_tables(tables).sort_by(_ORDER)))
        for segment in sources:
            self._log.delete(segment)


def table_of(passages: Sequence[Passage]) -> Any:
    """Return the table of passages, by time."""
    columns = {name: [getattr(passage, name) for passage in passages] for name in SCHEMA.names}
    for name in ("top_ids", "top_log_probs"):
        columns[name] = [rows.ravel() for rows in columns[name]]
    return pa.table(columns, schema=SCHEMA).sort_by(_ORDER)


def passages_of(table: Any) -> Iterator[Passage]:
    """Yield a table's rows; without the target's distributions they have K 0 and tail 0. Raises ValueError if a row's
    arrays do not fit together."""
    columns = {
        name: table.column(name).to_numpy() if name in _LISTS else table.column(name).to_pylist()
        for name in table.column_names
    }
    for row in range(table.num_rows):
        fields = {name: values[row] for name, values in columns.items()}
        n, top = len(fields["tokens"]), fields.pop("top", 0)
        for name, kind in (("top_ids", np.int32), ("top_log_probs", np.float32)):
            fields[name] = fields.get(name, np.zeros(0, kind)).reshape(n, top)
        yield Passage(**{"tail": np.zeros(n, np.float32)} | fields)


def _to_bytes(table: Any) -> bytes:
    """Return the bytes of a Parquet file, with checksums."""
    sink = pa.BufferOutputStream()
    pq.write_table(
        table,
        sink,
        compression="zstd",
        use_dictionary=[name for name in SCHEMA.names if SCHEMA.field(name).type == pa.string()],
        use_byte_stream_split=[f"{name}.list.element" for name in ("top_log_probs", "tail")],
        write_page_checksum=True,
    )
    return bytes(sink.getvalue())


def _from_bytes(data: bytes, columns: Sequence[str] | None = None) -> Any:
    """Return the table in a Parquet file, or some columns of it. Raises Unreadable."""
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        if not file.schema_arrow.equals(SCHEMA):
            raise Unreadable("its columns are not those of the traffic log")
        table = file.read(columns=columns, use_threads=False)
    except (pa.ArrowException, OSError, LookupError) as error:
        raise Unreadable(f"it is no Parquet file, or a damaged one: {error}") from error
    if any(column.null_count for column in table.columns):
        raise Unreadable("it has a null, which no verifier writes")
    return table
