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

from cloud_verifier.traffic import schema, segments
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


def test_segments_are_named_by_time_verifier_and_number(tmp_path: Path) -> None:
    write(tmp_path, [passage()], [passage(start=4)], verifier_id="a/b c")
    names = [str(path.relative_to(tmp_path)) for path in files(tmp_path)]
    assert [name[:35] for name in names] == ["2027-01-15/20270115T080000.000000-a"] * 2
    assert [name.rpartition("-")[2] for name in names] == ["000001.parquet", "000002.parquet"]
    assert all("-a_b_c-" in name for name in names)


def test_what_was_added_waits_for_a_flush_that_writes_it_as_one_segment(tmp_path: Path) -> None:
    writer = SegmentWriter(str(tmp_path))
    writer.flush()
    writer.add(passage(6))
    writer.add(passage(6, start=6))
    assert (files(tmp_path), writer.pending) == ([], 12)
    writer.flush()
    writer.flush()
    assert (len(files(tmp_path)), writer.pending) == (1, 0)


def test_passages_come_by_time_over_all_verifiers_segments(tmp_path: Path) -> None:
    all_of_them = minutes(12)
    write(tmp_path, all_of_them[0:12:3], all_of_them[1:12:3], verifier_id="v1")
    write(tmp_path, all_of_them[2:12:3], verifier_id="v0")
    assert contents(read(tmp_path)) == contents(all_of_them)
    assert contents(read(tmp_path, since=NOW + 300.0)) == contents(all_of_them[5:])


def test_a_segment_that_ends_before_what_is_asked_for_is_read_once_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = minutes(12)
    write(tmp_path, *(written[at : at + 3] for at in range(0, 12, 3)))
    opened: list[str] = []
    store_read = SegmentStore.read

    def watching(store: SegmentStore, path: str) -> bytes:
        opened.append(path)
        return store_read(store, path)

    monkeypatch.setattr(SegmentStore, "read", watching)
    log = SegmentLog(str(tmp_path))
    assert contents(list(log.read(0.0, NOW))) == contents(written)
    assert len(opened) == 4
    opened.clear()
    assert contents(list(log.read(NOW + 60.0 * 8, NOW))) == contents(written[8:])
    assert len(opened) == 2
    write(tmp_path, [passage(time_unix=NOW + 60.0, session_id="late"), passage(time_unix=NOW + 6e3)])
    opened.clear()
    assert contents(list(log.read(NOW + 5e3, NOW))) == contents([passage()])
    assert len(opened) == 1


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


@pytest.mark.parametrize("late", [False, True])
def test_what_two_have_merged_at_once_is_there_once_after_another_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """This holds although neither merged segment is small enough to be merged for its size."""
    written = minutes(8)
    write(tmp_path, *([one] for one in written[:6]))
    put, others = SegmentStore.put, SegmentLog(str(tmp_path))

    def meanwhile(store: SegmentStore, path: str, data: bytes) -> None:
        monkeypatch.setattr(SegmentStore, "put", put)
        if late:
            write(tmp_path, [written[6]])  # so that the other one merges something more
        others.compact(NOW)
        put(store, path, data)

    monkeypatch.setattr(SegmentStore, "put", meanwhile)
    log = SegmentLog(str(tmp_path))
    log.compact(NOW)
    write(tmp_path, [written[7]])
    monkeypatch.setattr(segments, "MERGED_BYTES", 4)  # whose quarter nothing is smaller than
    assert len(files(tmp_path)) == 3
    assert log.compact(NOW) == 2
    rows = sum(pq.read_metadata(path).num_rows for path in files(tmp_path))
    assert rows == len(read(tmp_path)) == 7 + late
    assert log.compact(NOW) == 0


def test_what_a_killed_compaction_left_goes_though_the_merged_segment_is_large(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, *([one] for one in minutes(3, expires_unix=NOW + 100)), [passage(expires_unix=NOW + 10)])

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(SegmentStore, "delete", killed)
        SegmentLog(str(tmp_path)).compact(NOW)
    monkeypatch.setattr(segments, "MERGED_BYTES", 4)
    log = SegmentLog(str(tmp_path))
    log.expire(NOW + 10)  # which writes the merged one anew
    assert len(files(tmp_path)) == 4
    assert log.compact(NOW + 10) == 4
    assert len(files(tmp_path)) == 1
    assert contents(read(tmp_path)) == contents(minutes(3))


def test_a_reader_sees_everything_once_while_segments_are_merged_under_it(tmp_path: Path) -> None:
    written = minutes(20)
    write(tmp_path, *([one] for one in written))
    reader = SegmentLog(str(tmp_path)).read(0.0, NOW)
    got = [next(reader) for _ in range(5)]
    assert SegmentLog(str(tmp_path)).compact(NOW) == 20
    got += reader
    assert contents(got) == contents(written)


def test_a_reader_survives_a_file_that_is_listed_and_never_there(tmp_path: Path) -> None:
    write(tmp_path, [passage()])
    [path] = files(tmp_path)
    (path.parent / path.name.replace("v1", "v2")).symlink_to(tmp_path / "nowhere")
    assert contents(read(tmp_path)) == contents([passage()])


# --- older formats


def of_the_first_format(passages: list[Passage]) -> pa.Table:
    table = schema.table_of(passages)
    return table.drop_columns(["prompt"]).replace_schema_metadata({schema.FORMAT_KEY: b"1"})


def test_segments_of_the_first_format_are_read_and_merged_with_newer_ones(tmp_path: Path) -> None:
    old, new = (
        [passage(start=3), passage(session_id="t")],
        [passage(session_id="u", prompt=np.arange(5, dtype=np.int32))],
    )
    write(tmp_path, new)
    pq.write_table(of_the_first_format(old), files(tmp_path)[0].parent / "20270115T080000.000000-old-1.parquet")
    log = SegmentLog(str(tmp_path))
    for _ in range(2):
        found = read(tmp_path)
        assert all(same(got, want) for got, want in zip(found, sorted([*old, *new], key=lambda p: p.key), strict=True))
        log.expire(NOW)
        log.compact(NOW)
    assert len(files(tmp_path)) == 1


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


def test_a_file_of_another_name_is_logged_and_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, [passage()])
    (tmp_path / "notes.txt").write_text("mine")
    log = SegmentLog(str(tmp_path))
    assert len(list(log.read(0.0, NOW))) == len(list(log.read(0.0, NOW))) == 1
    assert caplog.text.count("notes.txt is left out") == 1
    assert log.shrink(0) == 1
    assert [path.name for path in files(tmp_path)] == ["notes.txt"]


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


@pytest.mark.parametrize("what", FOREIGN)
def test_what_cannot_be_read_goes_when_it_is_older_than_anything_is_kept(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    days = 86_400.0
    write(tmp_path, [passage(expires_unix=NOW + 40 * days)])
    foreign = files(tmp_path)[0].parent / "20270115T080000.000000-other-1.parquet"
    FOREIGN[what](foreign)
    log = SegmentLog(str(tmp_path))
    assert log.expire(NOW + 39.9 * days) == 0
    assert log.expire(NOW + 40.1 * days) == 2
    assert files(tmp_path) == []
    FOREIGN[what](foreign)
    assert log.expire(NOW + 29.9 * days) == 0
    assert log.expire(NOW + 30.1 * days) == 1
    assert files(tmp_path) == []
    assert caplog.text.count("it cannot be read") == 2


def test_merging_drops_what_has_expired(tmp_path: Path) -> None:
    write(tmp_path, *([one] for one in minutes(4, expires_unix=NOW + 10)), [passage(expires_unix=NOW + 100)])
    assert SegmentLog(str(tmp_path)).compact(NOW + 10) == 5
    assert contents(read(tmp_path, now=NOW)) == contents([passage()])


def test_merging_everything_that_has_expired_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path, *([one] for one in minutes(4, expires_unix=NOW + 10)))
    assert SegmentLog(str(tmp_path)).compact(NOW + 10) == 4
    assert files(tmp_path) == []


def test_only_small_segments_of_one_day_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    today, tomorrow = minutes(3), [passage(time_unix=NOW + 86_400.0)]
    write(tmp_path, *([one] for one in today), tomorrow)
    log = SegmentLog(str(tmp_path))
    assert log.compact(NOW, at_least=4) == 0
    size = max(path.stat().st_size for path in files(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(segments, "MERGED_BYTES", 2 * size)  # of which a quarter is less than any of them has
        assert log.compact(NOW) == 0
    assert log.compact(NOW) == 3
    assert [len(files(day)) for day in sorted(tmp_path.iterdir())] == [1, 1]
    assert contents(read(tmp_path)) == contents([*today, *tomorrow])


def test_a_merged_segment_is_no_larger_than_it_may_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, *([one] for one in minutes(20)))
    size = max(path.stat().st_size for path in files(tmp_path))
    monkeypatch.setattr(segments, "MERGED_BYTES", 5 * size)
    assert SegmentLog(str(tmp_path)).compact(NOW) == 20
    assert len(files(tmp_path)) == 4
    assert contents(read(tmp_path)) == contents(minutes(20))


def test_the_oldest_make_room(tmp_path: Path) -> None:
    written = minutes(6)
    write(tmp_path, *([one] for one in written))
    sizes = [path.stat().st_size for path in files(tmp_path)]
    log = SegmentLog(str(tmp_path))
    assert log.shrink(sum(sizes)) == 0
    assert log.shrink(sum(sizes[3:])) == 3
    assert contents(read(tmp_path)) == contents(written[3:])


def test_a_place_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError):
        SegmentLog(str(tmp_path / "file"))
    with pytest.raises(ValueError, match="nosuchstore"):
        SegmentLog("nosuchstore://bucket")


def test_an_object_store_gets_whole_objects(tmp_path: Path) -> None:
    write("memory://bucket/log", [passage()])
    [path] = fsspec.filesystem("memory").find("/bucket/log")
    assert path.endswith("000001.parquet")
    assert contents(read("memory://bucket/log")) == contents([passage()])
