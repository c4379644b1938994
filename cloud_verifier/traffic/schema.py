"""Convert passages to Parquet and back. A reader takes its own format and older ones, and leaves newer ones alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from cloud_verifier.traffic.passage import NO_PROMPT, Passage

FORMAT = 2
FORMAT_KEY = b"outrider.traffic.format"
"""The key of the format's number in the schema's metadata."""
_SOURCES_KEY = b"outrider.traffic.sources"
"""The key, in the metadata, of the ids of the segments that this one was merged from; readers may ignore it."""
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
        ("guessed", pa.list_(pa.uint8())),
        ("temperature", pa.float64()),
        ("time_unix", pa.float64()),
        ("expires_unix", pa.float64()),
        ("prompt", pa.list_(pa.int32())),  # since format 2; empty but where it may be kept, and start is 0
    ],
    metadata={FORMAT_KEY: str(FORMAT).encode()},
)
_SCHEMA_1: Any = SCHEMA.remove(SCHEMA.get_field_index("prompt")).with_metadata({FORMAT_KEY: b"1"})
KEY = [("time_unix", "ascending"), ("session_id", "ascending"), ("start", "ascending")]
"""The order of rows (Passage.key)."""
_FIELDS = {"guessed": "proposed_depths"}  # column -> field of Passage, if their names differ
_LISTS = "tokens", "top_ids", "top_log_probs", "tail", "guessed", "prompt"
_PLAIN = tuple(name for name in SCHEMA.names if name not in (*_LISTS, "top"))
_HEAVY = "top", "top_ids", "top_log_probs", "tail", "prompt"
LIGHT = tuple(name for name in SCHEMA.names if name not in _HEAVY)
"""All columns but the target's distributions, which are nearly all of a file's bytes, and the prompt."""
_NO_IDS, _NO_LOG_PROBS = np.zeros(0, np.int32), np.zeros(0, np.float32)
_NAMES = "session_id", "tenant", "traffic_class", "draft_release", "weights_hash"


class Unreadable(ValueError):
    """The bytes are no segment, a damaged one, or one of a newer format."""


def table_of(passages: Sequence[Passage]) -> Any:
    """Return the table of passages, sorted by key."""
    passages = sorted(passages, key=lambda passage: passage.key)
    columns = {name: [getattr(passage, _FIELDS.get(name, name)) for passage in passages] for name in SCHEMA.names}
    for name in ("top_ids", "top_log_probs"):
        columns[name] = [rows.ravel() for rows in columns[name]]
    return pa.table(columns, schema=SCHEMA)


def passages_of(table: Any) -> Iterator[Passage]:
    """Yield a table's rows. With the LIGHT columns alone they have K 0, tail 0 and no prompt.

    Raises Unreadable if a row's arrays do not fit together.
    """
    present = set(table.column_names)
    columns = {name: table.column(name).to_pylist() for name in (*_PLAIN, "top") if name in present}
    lists = {name: table.column(name).to_numpy() for name in _LISTS if name in present}
    tops = columns.pop("top", [0] * table.num_rows)
    for row in range(table.num_rows):
        arrays = {name: rows[row] for name, rows in lists.items()}
        n, top = len(arrays["tokens"]), tops[row]
        try:
            yield Passage(
                tokens=arrays["tokens"],
                top_ids=arrays.get("top_ids", _NO_IDS).reshape(n, top),
                top_log_probs=arrays.get("top_log_probs", _NO_LOG_PROBS).reshape(n, top),
                tail=arrays.get("tail", np.zeros(n, np.float32)),
                proposed_depths=arrays["guessed"],
                prompt=arrays.get("prompt", NO_PROMPT),
                **{name: values[row] for name, values in columns.items()},
            )
        except (TypeError, ValueError) as error:
            raise Unreadable(f"its row {row} does not fit together: {error}") from error


def to_bytes(table: Any) -> bytes:
    """Return the bytes of a Parquet file, with checksums."""
    sink = pa.BufferOutputStream()
    split = [f"{name}.list.element" for name in ("top_log_probs", "tail")]
    pq.write_table(
        table,
        sink,
        compression="zstd",
        use_dictionary=list(_NAMES),
        use_byte_stream_split=split,
        write_page_checksum=True,
    )
    return bytes(sink.getvalue())


def from_bytes(data: bytes, columns: Sequence[str] | None = None) -> Any:
    """Return the table in a Parquet file, or some columns of it. Raises Unreadable."""
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
        _check(file.schema_arrow)
        table = file.read(columns=columns, use_threads=False)
        if any(column.null_count for column in table.columns):
            raise Unreadable("it has a null, which no verifier writes")
        return table if columns is not None else _upgraded(table)
    except Unreadable:
        raise
    except (pa.ArrowException, OSError, ValueError, LookupError) as error:
        raise Unreadable(f"it is no Parquet file, or a damaged one: {error}") from error


def sources_of(table: Any) -> frozenset[str]:
    """Return the sources given to `merged_from`; nothing for a table that was written and not merged."""
    sources: bytes = (table.schema.metadata or {}).get(_SOURCES_KEY, b"")
    return frozenset(sources.decode("ascii", "replace").split())


def merged_from(table: Any, sources: Collection[str]) -> Any:
    """Return the table with its sources in the metadata. sources: words without spaces."""
    return table.replace_schema_metadata({**SCHEMA.metadata, _SOURCES_KEY: " ".join(sorted(sources)).encode()})


def unexpired(table: Any, now: float, since: float = float("-inf")) -> Any:
    """Return the rows that expire after `now` and were produced at or after `since`."""
    return table.filter(
        pc.and_(pc.greater(table.column("expires_unix"), now), pc.greater_equal(table.column("time_unix"), since))
    )


def sorted_unique(table: Any) -> Any:
    """Return the table's rows by key, each once."""
    table = table.sort_by(KEY)
    if table.num_rows < 2:
        return table
    again = np.ones(table.num_rows - 1, dtype=bool)
    for name, _ in KEY:
        column = table.column(name)
        again &= pc.equal(column.slice(1), column.slice(0, table.num_rows - 1)).to_numpy()
    return table.filter(pa.array(np.concatenate(([True], ~again))))


def _check(schema: Any) -> None:
    """Raise Unreadable if a file's schema is not that of a format which is known here."""
    text = (schema.metadata or {}).get(FORMAT_KEY)
    if text is None or not text.isdigit():
        raise Unreadable("it is Parquet, but no segment of the traffic log")
    number = int(text)
    if number > FORMAT:
        raise Unreadable(f"its format is {number}, newer than {FORMAT}, which is the latest that is known here")
    known = _SCHEMA_1 if number == 1 else SCHEMA
    if not schema.remove_metadata().equals(known.remove_metadata()):
        raise Unreadable(f"its columns are not those of format {number}")


def _upgraded(table: Any) -> Any:
    """Return a table of an older format with the columns that it lacks."""
    if "prompt" not in table.column_names:
        field = SCHEMA.field("prompt")
        table = table.append_column(field, pa.array([NO_PROMPT] * table.num_rows, field.type))
    return table.replace_schema_metadata({**table.schema.metadata, **SCHEMA.metadata})
