"""Test that data written to the traffic log is read back, once, until it expires; and nothing else."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from passages import NOW, contents, passage, passages, same

from cloud_verifier.traffic import schema
from cloud_verifier.traffic.passage import Passage
from cloud_verifier.traffic.segments import SegmentLog, SegmentWriter
from cloud_verifier.traffic.store import GIVEN_UP_S, SegmentStore

numbers = itertools.count()


def write(place: object, *batches: list[Passage], verifier_id: str = "v1") -> None:
    """Write one segment for each batch."""
    writer = SegmentWriter(str(place), verifier_id=verifier_id)
    for batch in batches:
        for one in batch:
            writer.add(one)
        writer.flush()


def read(place: object, since: float = 0.0, now: float = NOW) -> list[Passage]:
    return list(SegmentLog(str(place)).read(since, now))


def files(place: Path) -> list[Path]:
    return sorted(path for path in place.rglob("*") if path.is_file())


def minutes(count: int, **changes: object) -> list[Passage]:
    """Return one passage a minute, each of a session of its own."""
    return [passage(3, seed=i, session_id=f"s{i:03d}", time_unix=NOW + 60.0 * i, **changes) for i in range(count)]


# --- written and read


@given(st.lists(passages(), max_size=12, unique_by=lambda one: one.key), st.integers(1, 20))
@settings(deadline=None, max_examples=40)
def test_what_was_written_comes_back_by_time_and_nothing_is_lost(written: list[Passage], flush_tokens: int) -> None:
    place = f"memory://traffic-{next(numbers)}"  # an object store, as far as we can tell
    writer = SegmentWriter(place)
    for one in written:
        writer.add(one)
        if writer.pending >= flush_tokens:
            writer.flush()
    writer.flush()
    expected = sorted(written, key=lambda one: one.key)
    assert all(same(got, want) for got, want in zip(read(place), expected, strict=True))
    log = SegmentLog(place)
    log.compact(NOW)
    log.expire(NOW)
    assert all(same(got, want) for got, want in zip(read(place), expected, strict=True))


def test_passages_without_distributions_are_complete_otherwise_and_the_columns_are_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = [passage(5, prompt=np.arange(9, dtype=np.int32)), passage(0, session_id="none"), *minutes(3)]
    write(tmp_path, written)
    columns: list[object] = []
    decode = pq.ParquetFile.read

    def watching(file: pq.ParquetFile, columns_: object = None, **options: object) -> pa.Table:
        columns.extend(options["columns"])  # type: ignore[call-overload]
        return decode(file, **options)

    monkeypatch.setattr(pq.ParquetFile, "read", watching)
    got = list(SegmentLog(str(tmp_path)).read(0.0, NOW, whole=False))
    assert set(columns) == {*schema.SCHEMA.names} - {"top", "top_ids", "top_log_probs", "tail", "prompt"}
    for one, want in zip(got, sorted(written, key=lambda one: one.key), strict=True):
        none = {"top_ids": want.top_ids[:, :0], "top_log_probs": want.top_log_probs[:, :0], "prompt": want.prompt[:0]}
        assert same(one, dataclasses.replace(want, tail=np.zeros_like(want.tail), **none))


# --- killed midway


def test_a_write_that_is_killed_before_its_rename_has_not_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, [passage()])
    writer = SegmentWriter(str(tmp_path))
    writer.add(passage(start=4))

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        patch.setattr(os, "unlink", killed)  # nothing is tidied up after a kill
        with pytest.raises(KeyboardInterrupt):
            writer.flush()
    [left] = [path for path in files(tmp_path) if path.suffix == ".partial"]
    assert contents(read(tmp_path)) == contents([passage()])
    SegmentLog(str(tmp_path)).expire(NOW)
    assert left.exists()  # somebody may be writing it
    os.utime(left, (0, left.stat().st_mtime - GIVEN_UP_S - 1))
    SegmentLog(str(tmp_path)).expire(NOW)
    assert not left.exists()
    writer.flush()  # had it lived it could have tried again
    assert len(read(tmp_path)) == 2


@pytest.mark.parametrize("deleted", [0, 1, 2])
def test_a_compaction_that_is_killed_loses_nothing_and_doubles_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deleted: int
) -> None:
    written = minutes(3)
    write(tmp_path, *([one] for one in written))
    left = deleted
    delete = SegmentStore.delete

    def killed(store: SegmentStore, path: str) -> None:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= 1
        delete(store, path)

    with monkeypatch.context() as patch:
        patch.setattr(SegmentStore, "delete", killed)
        with pytest.raises(KeyboardInterrupt):
            SegmentLog(str(tmp_path)).compact(NOW)
    assert len(files(tmp_path)) == 4 - deleted
    assert contents(read(tmp_path)) == contents(written)
    SegmentLog(str(tmp_path)).compact(NOW)
    assert len(files(tmp_path)) == 1
    assert contents(read(tmp_path)) == contents(written)


def test_a_reader_sees_everything_once_while_segments_are_merged_under_it(tmp_path: Path) -> None:
    written = minutes(20)
    write(tmp_path, *([one] for one in written))
    reader = SegmentLog(str(tmp_path)).read(0.0, NOW)
    got = [next(reader) for _ in range(5)]
    assert SegmentLog(str(tmp_path)).compact(NOW) == 20
    got += reader
    assert contents(got) == contents(written)


# --- older formats


# --- what cannot be read


def newer(path: Path) -> None:
    table = schema.table_of([passage()]).replace_schema_metadata({schema.FORMAT_KEY: b"3"})
    pq.write_table(table, path)


def without_tokens(path: Path) -> None:
    table, place = schema.table_of([passage()]), schema.SCHEMA.get_field_index("tokens")
    field = schema.SCHEMA.field(place)
    path.write_bytes(schema.to_bytes(table.set_column(place, field, pa.array([None], field.type))))


FOREIGN: dict[str, Callable[[Path], object]] = {
    "no Parquet file": lambda path: path.write_bytes(b"not at all"),
    "an empty file": lambda path: path.write_bytes(b""),
    "half a segment": lambda path: path.write_bytes(schema.to_bytes(schema.table_of([passage()]))[:-50]),
    "somebody else's Parquet": lambda path: pq.write_table(pa.table({"tokens": [1, 2]}), path),
    "a newer format": newer,
}
DAMAGED = {**FOREIGN, "a row without tokens": without_tokens}
"""With a file whose expiry can be read."""


@pytest.mark.parametrize("what", DAMAGED)
def test_what_cannot_be_read_is_left_out_and_left_alone_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    write(tmp_path, [passage(), passage(start=4)], [passage(session_id="t")])
    foreign = files(tmp_path)[0].parent / "20270115T080000.000000-other-1.parquet"
    DAMAGED[what](foreign)
    before = foreign.read_bytes()
    log = SegmentLog(str(tmp_path))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert len(list(log.read(0.0, NOW))) == 3
        log.compact(NOW)
        log.expire(NOW)
    [line] = [record.getMessage() for record in caplog.records if foreign.name in record.getMessage()]
    assert len(read(tmp_path)) == 3
    assert foreign.read_bytes() == before
    assert "is left out of the traffic log" in line
    assert ("format is 3, newer than 2" in line) == (what == "a newer format")


def test_a_damaged_byte_never_comes_out_as_a_token(tmp_path: Path) -> None:
    genuine = passage(200, top=8)
    write(tmp_path, [genuine])
    [path] = files(tmp_path)
    data = path.read_bytes()
    rng = random.Random(1)
    for at in rng.sample(range(len(data)), 60):
        path.write_bytes(data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :])
        for got in read(tmp_path):
            assert (got.tokens == genuine.tokens).all()
            assert (got.top_ids == genuine.top_ids).all()


# --- what has expired, and what is too much


def test_expired_rows_never_come_out_and_are_deleted_for_good(tmp_path: Path) -> None:
    short, long = passage(expires_unix=NOW + 10), passage(session_id="t", expires_unix=NOW + 100)
    write(tmp_path, [short, long], [short.cut(1, 2)])
    assert len(read(tmp_path, now=NOW)) == 3
    assert contents(read(tmp_path, now=NOW + 10)) == contents([long])  # whether or not anybody has tidied up
    log = SegmentLog(str(tmp_path))
    assert log.expire(NOW) == 0
    assert log.expire(NOW + 10) == 2
    assert contents(read(tmp_path, now=NOW)) == contents([long])  # the others are gone
    assert log.expire(NOW + 100) == 1
    assert files(tmp_path) == []


def test_the_oldest_make_room(tmp_path: Path) -> None:
    written = minutes(6)
    write(tmp_path, *([one] for one in written))
    sizes = [path.stat().st_size for path in files(tmp_path)]
    log = SegmentLog(str(tmp_path))
    assert log.shrink(sum(sizes)) == 0
    assert log.shrink(sum(sizes[3:])) == 3
    assert contents(read(tmp_path)) == contents(written[3:])


def test_an_object_store_gets_whole_objects(tmp_path: Path) -> None:
    write("memory://bucket/log", [passage()])
    [path] = fsspec.filesystem("memory").find("/bucket/log")
    assert path.endswith("000001.parquet")
    assert contents(read("memory://bucket/log")) == contents([passage()])
