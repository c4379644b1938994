"""Test that data written to the traffic log is read back until it expires or is withdrawn; and nothing else."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from passages import NOW, contents, passage, passages, same
from test_traffic_recorder import until

from cloud_verifier.config import VerifierConfig
from cloud_verifier.traffic import segments
from cloud_verifier.traffic.passage import Passage
from cloud_verifier.traffic.recorder import RecordedSession, keep_tidy, recorder_of
from cloud_verifier.traffic.segments import MANY, SCHEMA, SegmentLog, SegmentWriter, table_of
from outrider.wire.v1 import engine_pb2 as pb

numbers = itertools.count()


def write(place: object, *batches: list[Passage]) -> None:
    """Write one segment for each batch."""
    writer = SegmentWriter(str(place), verifier_id="v1")
    for batch in batches:
        for one in batch:
            writer.add(one)
        writer.flush()


def read(place: object, since: float = 0.0, now: float = NOW) -> list[Passage]:
    return list(SegmentLog(str(place)).read(since, now))


def files(place: Path) -> list[Path]:
    return sorted(path for path in place.rglob("*") if path.is_file())


def seconds(count: int) -> list[Passage]:
    """Return one passage a second, each of a session of its own."""
    return [passage(3, seed=i, session_id=f"s{i:03d}", time_unix=NOW + i) for i in range(count)]


@given(st.lists(passages(), max_size=12), st.integers(1, 20))
@settings(max_examples=40)
def test_what_was_written_comes_back_and_nothing_is_lost(written: list[Passage], flush_tokens: int) -> None:
    place = f"memory://traffic-{next(numbers)}"  # an object store, as far as we can tell
    writer = SegmentWriter(place)
    for one in written:
        writer.add(one)
        if writer.pending >= flush_tokens:
            writer.flush()
    writer.flush()
    SegmentLog(place).expire(NOW)
    for since in (0.0, NOW + 86_400.0):
        expected = [one for one in written if one.time_unix >= since]
        got = read(place, since)
        assert len(got) == len(expected)
        assert all(any(same(one, other) for other in got) for one in expected)


def test_small_segments_of_a_process_become_one_also_under_a_reader(tmp_path: Path) -> None:
    written = seconds(MANY)
    writer = SegmentWriter(str(tmp_path))
    for one in written[:-1]:
        writer.add(one)
        writer.flush()
    reader = SegmentLog(str(tmp_path)).read(0.0, NOW)
    got = [next(reader) for _ in range(5)]
    writer.add(written[-1])
    writer.flush()
    assert len(files(tmp_path)) == 1
    got += reader
    assert {one.session_id for one in got} == {one.session_id for one in written}
    assert contents(read(tmp_path)) == contents(written)


@pytest.mark.parametrize("deleted", [0, 1, 2])
def test_a_merge_that_is_killed_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deleted: int) -> None:
    monkeypatch.setattr(segments, "MANY", 3)
    written = seconds(3)
    delete, left = SegmentLog.delete, iter(range(deleted))

    def killed(log: SegmentLog, segment: segments.Segment) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        delete(log, segment)

    monkeypatch.setattr(SegmentLog, "delete", killed)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path, *([one] for one in written))
    assert len(files(tmp_path)) == 4 - deleted
    assert {one.session_id for one in read(tmp_path)} == {one.session_id for one in written}


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
    os.utime(left, (0, left.stat().st_mtime - segments.GIVEN_UP_S - 1))
    SegmentLog(str(tmp_path)).expire(NOW)
    assert not left.exists()
    writer.flush()  # had it lived it could have tried again
    assert len(read(tmp_path)) == 2


def without_tokens() -> bytes:
    place = SCHEMA.get_field_index("tokens")
    return segments._to_bytes(
        table_of([passage()]).set_column(place, SCHEMA.field(place), pa.nulls(1, pa.list_(pa.int32())))
    )


def somebody_elses() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"tokens": [1, 2]}), sink)
    return bytes(sink.getvalue())


DAMAGED: dict[str, Callable[[], bytes]] = {
    "no Parquet file": lambda: b"not at all",
    "an empty file": bytes,
    "half a segment": lambda: segments._to_bytes(table_of([passage()]))[:-50],
    "somebody else's Parquet": somebody_elses,
    "a row without tokens": without_tokens,
}


@pytest.mark.parametrize("what", DAMAGED)
def test_what_cannot_be_read_is_left_out_with_one_warning_and_deleted_once_it_expires(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    write(tmp_path, [passage(), passage(start=4)], [passage(session_id="t")])
    named = dataclasses.replace(SegmentLog(str(tmp_path)).segments()[0], writer="other-1")
    foreign = tmp_path / named.path
    foreign.write_bytes(DAMAGED[what]())
    log = SegmentLog(str(tmp_path))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert len(list(log.read(0.0, NOW))) == 3
        log.expire(NOW)
    [line] = [record.getMessage() for record in caplog.records if foreign.name in record.getMessage()]
    assert "is left out of the traffic log" in line and foreign.exists()
    log.expire(named.expires / 1e3)
    assert not foreign.exists()


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


def test_all_of_a_tenant_can_be_deleted_and_of_no_other(tmp_path: Path) -> None:
    kept = [passage(tenant="kept", session_id="a"), passage(tenant="kept", session_id="z")]
    gone = passage(tenant="gone", session_id="b")
    write(tmp_path, [kept[0], gone, kept[1]], [gone], kept)
    assert SegmentLog(str(tmp_path)).forget("gone") == 2
    assert sorted(one.session_id for one in read(tmp_path)) == ["a", "a", "z", "z"]


def test_a_verifiers_recorder_writes_to_the_configured_place_and_tidies_it(tmp_path: Path) -> None:
    place = tmp_path / "log"
    write(place, [passage(time_unix=0.0, expires_unix=1.0)])
    config = VerifierConfig(model=tmp_path, traffic=str(place), traffic_redact=f"{__name__}:nothing_of_5")
    recorder = recorder_of(config, "v7")
    until(lambda: files(place) == [])
    recorder.begin(RecordedSession("s", "acme", "code", "w", 0.0, 60.0), 1)
    one = pb.RecordedTokens(
        start=2, token=[4, 5], top=1, top_ids=bytes(8), top_log_probs=bytes(4), tail=bytes(4), proposed_depths=b"\1\0"
    )
    recorder.take(pb.EngineEvent(session_id="s", epoch=1, recorded=one))
    recorder.close()
    assert contents(read(place, now=time.time())) == [("s", 2, [4])]
    [path] = files(place)
    assert "-v7-" in path.name


def nothing_of_5(tokens, traffic_class, tenant):
    return tokens == 5


def test_the_oldest_go_where_the_log_is_too_large(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path, *([passage(1, time_unix=1e9 + i, expires_unix=4e9)] for i in range(3)))
    most = sum(path.stat().st_size for path in files(tmp_path)[1:])
    with caplog.at_level(logging.WARNING):
        stop = keep_tidy(SegmentLog(str(tmp_path)), max_bytes=most)
        until(lambda: "1 of the oldest segments were deleted" in caplog.text)
    stop()
    assert len(read(tmp_path, now=2e9)) == 2
