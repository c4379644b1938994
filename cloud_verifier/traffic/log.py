"""Keep the traffic log: Parquet files, each of one verifier process and of one day (UTC) on which its rows expire.

    log/2026-12-22/verifier-1-3fa9c1d2-000001.parquet

A file exists whole or not at all. With each flush a process replaces its newest file by one with the new rows behind
the old, until that is large. Retention deletes the folders of days that are over; a row that has expired is never read
meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import secrets
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
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

FULL_BYTES = 4 << 20
"""A file of so many bytes gets no further rows."""
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
_LIGHT = [name for name in SCHEMA.names if name not in ("top", "top_ids", "top_log_probs", "tail")]
"""All columns but those of the target's distributions, which are nearly all of a file's bytes."""
_STRINGS = [name for name in SCHEMA.names if SCHEMA.field(name).type == pa.string()]
_LISTS = [name for name in SCHEMA.names if pa.types.is_list(SCHEMA.field(name).type)]
_NAME = re.compile(r"\d{4}-\d\d-\d\d/[^/]+\.parquet")


class TrafficLog:
    """Reads, tidies and, for one process, writes the log at one place. Writing is not thread-safe."""

    def __init__(self, url: str, writer: str = "") -> None:
        """Open `url`, a directory, which is created, or a URL for fsspec. writer: names the process that writes.

        Raises ImportError if fsspec lacks a package, OSError or ValueError if there is no such place.
        """
        self._fs, root = fsspec.core.url_to_fs(url)
        self._root = root.rstrip("/")
        self._local = isinstance(self._fs, LocalFileSystem)
        if self._local:
            os.makedirs(self._root, exist_ok=True)
        self._writer = f"{re.sub(r'[^A-Za-z0-9._-]', '_', writer)}-{secrets.token_hex(4)}"
        self._numbers = itertools.count(1)
        self._growing: dict[str, str] = {}
        """By day, the file of this process that gets the next rows."""
        self._warned: set[str] = set()

    def write(self, passages: Iterable[Passage]) -> None:
        """Write passages, to one file for each day on which some of them expire. Raises OSError."""
        by_day: dict[str, list[Passage]] = defaultdict(list)
        for one in passages:
            by_day[_day(one.expires_unix)].append(one)
        for day, some in by_day.items():
            path, table = self._growing.pop(day, ""), table_of(some)
            try:
                table = pa.concat_tables([self._load(path), table]) if path else table
            except (FileNotFoundError, ValueError):  # somebody has deleted or damaged it
                path = ""
            path = path or f"{day}/{self._writer}-{next(self._numbers):06d}.parquet"
            if self._put(path, table) < FULL_BYTES:
                self._growing[day] = path

    def read(self, since_unix: float = 0.0, now: float | None = None, *, whole: bool = True) -> Iterator[Passage]:
        """Yield the passages from `since_unix` on that have not expired by `now` (None: the present).

        They come file by file, and by time within each. whole: False for passages without the target's distributions
        (their K is 0), which costs a fraction. A file that cannot be read is named in a warning and left out. Other
        processes may write and delete meanwhile.
        """
        now = time.time() if now is None else now
        for path in self._files():
            try:
                if self._modified_unix(path) < since_unix:
                    continue
                table = self._load(path, None if whole else _LIGHT)
                fresh = pc.greater_equal(table.column("time_unix"), since_unix)
                unexpired = pc.greater(table.column("expires_unix"), now)
                yield from passages_of(table.filter(pc.and_(fresh, unexpired)))
            except FileNotFoundError:
                pass  # it was deleted since it was listed
            except ValueError as error:
                if path not in self._warned:
                    self._warned.add(path)
                    log.warning("%s is left out of the traffic log: %s", path, error)

    def forget(self, tenant: str) -> int:
        """Delete all passages of a tenant, and unreadable files; return how many files were deleted or rewritten.

        What a verifier is about to write comes after this.
        """
        changed = 0
        for path in self._files():
            with contextlib.suppress(FileNotFoundError):
                changed += self._without(path, tenant)
        return changed

    def tidy(self, max_bytes: float = float("inf"), now: float | None = None) -> int:
        """Delete the days that are over, and then the oldest files while all have more bytes; return how many those
        were."""
        today = _day(time.time() if now is None else now)
        for day in {path.partition("/")[0] for path in self._files()}:
            if day < today:
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm(f"{self._root}/{day}", recursive=True)
        sizes, deleted = self._files(), 0
        total = sum(sizes.values())
        for path in sorted(sizes, key=self._modified_unix) if total > max_bytes else ():
            if total > max_bytes:
                self._delete(path)
                total, deleted = total - sizes[path], deleted + 1
        return deleted

    def _files(self) -> dict[str, int]:
        """Return the size in bytes of each file, by its path below the root."""
        self._fs.invalidate_cache()
        try:
            found: dict[str, dict[str, Any]] = self._fs.find(self._root, detail=True)
        except FileNotFoundError:
            return {}
        paths = {path[len(self._root) :].lstrip("/"): int(about.get("size") or 0) for path, about in found.items()}
        return {path: size for path, size in sorted(paths.items()) if _NAME.fullmatch(path)}

    def _modified_unix(self, path: str) -> float:
        """Return when a file was written: nothing in it is newer. Raises FileNotFoundError."""
        return float(self._fs.modified(f"{self._root}/{path}").timestamp())

    def _put(self, path: str, table: Any) -> int:
        """Write a file, and return its size. If the process is killed midway, nothing has changed. Raises OSError."""
        sink, target = pa.BufferOutputStream(), f"{self._root}/{path}"
        floats = [f"{name}.list.element" for name in ("top_log_probs", "tail")]  # as Parquet calls the lists' values
        compact = {"use_dictionary": _STRINGS, "use_byte_stream_split": floats}
        pq.write_table(table, sink, compression="zstd", write_page_checksum=True, **compact)
        data = bytes(sink.getvalue())
        if self._local:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            atomic_files.write(Path(target), data)
        else:
            self._fs.pipe_file(target, data)  # object stores show an object when it is complete
        return len(data)

    def _load(self, path: str, columns: list[str] | None = None) -> Any:
        """Return a file's table, or some columns of it. Raises FileNotFoundError, and ValueError for a damaged file."""
        data = bytes(self._fs.cat_file(f"{self._root}/{path}"))
        try:
            file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
            if not file.schema_arrow.equals(SCHEMA):
                raise ValueError("its columns are not those of the traffic log")
            return file.read(columns=columns, use_threads=False)
        except (pa.ArrowException, OSError, LookupError) as error:
            raise ValueError(f"it is no Parquet file, or a damaged one: {error}") from error

    def _without(self, path: str, tenant: str) -> bool:
        """Rewrite a file without a tenant's rows; return whether anything was deleted. Raises FileNotFoundError."""
        try:
            table = self._load(path)
        except ValueError as error:
            log.warning("%s is deleted, since it may hold what must go: %s", path, error)
            self._delete(path)
            return True
        rows = table.filter(pc.not_equal(table.column("tenant"), tenant))
        if rows.num_rows == table.num_rows:
            return False
        if rows.num_rows:
            self._put(path, rows)
        else:
            self._delete(path)
        return True

    def _delete(self, path: str) -> None:
        """Delete a file, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(f"{self._root}/{path}")


def table_of(passages: Iterable[Passage]) -> Any:
    """Return the table of passages, by time."""
    ordered = sorted(passages, key=lambda one: (one.time_unix, one.session_id, one.start))
    columns = {name: [getattr(passage, name) for passage in ordered] for name in SCHEMA.names}
    for name in ("top_ids", "top_log_probs"):
        columns[name] = [rows.ravel() for rows in columns[name]]
    return pa.table(columns, schema=SCHEMA)


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


def _day(time_unix: float) -> str:
    return f"{datetime.fromtimestamp(time_unix, UTC):%Y-%m-%d}"
