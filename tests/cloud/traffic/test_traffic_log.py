"""Test that data written to the traffic log is read back until it expires or is withdrawn; and nothing else."""

from __future__ import annotations

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
from passages import NOW, begin, contents, passage, passages, same
from test_traffic_recorder import until

from cloud_verifier.config import VerifierConfig
from cloud_verifier.traffic import log as module
from cloud_verifier.traffic import recorder as recorder_module
from cloud_verifier.traffic.log import TrafficLog, table_of
from cloud_verifier.traffic.passage import Passage
from cloud_verifier.traffic.recorder import TrafficRecorder, recorder_of
from outrider.wire.v1 import engine_pb2 as pb

DAY_S = 86_400.0
numbers = itertools.count()


def write(place: object, *batches: list[Passage]) -> TrafficLog:
    """Write each batch by a process of its own; return the last one's log."""
    for batch in batches:
        log = TrafficLog(str(place), "v1")
        log.write(batch)
    return log


def read(place: object, since: float = 0.0, now: float = NOW) -> list[Passage]:
    return list(TrafficLog(str(place)).read(since, now))


def files(place: Path) -> list[Path]:
    return sorted(path for path in place.rglob("*") if path.is_file())


@given(st.lists(st.lists(passages(), max_size=4), max_size=4))
@settings(max_examples=40)
def test_what_was_written_comes_back_and_nothing_is_lost(batches: list[list[Passage]]) -> None:
    place = f"memory://traffic-{next(numbers)}"  # an object store, as far as we can tell
    log = TrafficLog(place)
    for batch in batches:
        log.write(batch)
    log.tidy(now=NOW)
    expected = [one for batch in batches for one in batch]
    got = read(place)
    assert len(got) == len(expected)
    assert all(any(same(one, other) for other in got) for one in expected)


def test_a_process_has_one_file_a_day_until_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, written = TrafficLog(str(tmp_path)), [passage(3, seed=i, session_id=f"s{i}") for i in range(6)]
    for one in written[:5]:
        log.write([one])
    assert len(files(tmp_path)) == 1
    log.write([passage(session_id="later", expires_unix=NOW + DAY_S + 3600)])
    assert len(files(tmp_path)) == 2
    monkeypatch.setattr(module, "FULL_BYTES", 1)
    for _ in range(2):
        log.write([written[5]])
    assert len(files(tmp_path)) == 3
    assert {one.session_id for one in read(tmp_path)} == {*(one.session_id for one in written), "later"}


def test_only_what_is_new_is_read_and_without_distributions_if_they_are_not_asked_for(tmp_path: Path) -> None:
    now = time.time()
    old, new = (passage(session_id=str(age), time_unix=now - age, expires_unix=now + 9.0) for age in (100, 0))
    log = write(tmp_path, [old, new])
    assert contents(list(log.read(now - 50))) == contents([new])
    [light] = log.read(now - 50, whole=False)
    assert light.top_ids.shape == (4, 0) and light.tokens.tolist() == new.tokens.tolist()
    assert list(log.read(now + 50)) == []


def test_a_write_that_is_killed_before_its_rename_has_not_happened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = write(tmp_path, [passage()])

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        patch.setattr(os, "unlink", killed)  # nothing is tidied up after a kill
        with pytest.raises(KeyboardInterrupt):
            log.write([passage(start=4)])
    assert contents(read(tmp_path)) == contents([passage()])
    log.write([passage(start=4)])  # had it lived it could have tried again
    assert len(read(tmp_path)) == 2


def half() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(table_of([passage()]), sink)
    return bytes(sink.getvalue())[:-50]


def somebody_elses() -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"tokens": [1, 2]}), sink)
    return bytes(sink.getvalue())


DAMAGED: dict[str, Callable[[], bytes]] = {
    "no Parquet file": lambda: b"not at all",
    "an empty file": bytes,
    "half a file": half,
    "somebody else's Parquet": somebody_elses,
}


@pytest.mark.parametrize("what", DAMAGED)
def test_what_cannot_be_read_is_left_out_with_one_warning_and_deleted_with_its_day(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    log = write(tmp_path, [passage(), passage(start=4)], [passage(session_id="t")])
    [day] = tmp_path.iterdir()
    damaged = day / "other-1.parquet"
    damaged.write_bytes(DAMAGED[what]())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert len(list(log.read(0.0, NOW))) == 3
    [line] = [record.getMessage() for record in caplog.records if damaged.name in record.getMessage()]
    assert "is left out of the traffic log" in line and damaged.exists()
    log.tidy(now=NOW + DAY_S)
    assert not day.exists()


def test_expired_rows_never_come_out_and_are_deleted_when_their_day_is_over(tmp_path: Path) -> None:
    short, long = passage(expires_unix=NOW + 10), passage(session_id="t", expires_unix=NOW + DAY_S)
    log = write(tmp_path, [short, long], [short.cut(1, 2)])
    assert len(read(tmp_path, now=NOW)) == 3
    assert contents(read(tmp_path, now=NOW + 10)) == contents([long])  # whether or not anybody has tidied up
    log.tidy(now=NOW + 10)
    assert len(read(tmp_path, now=NOW)) == 3
    log.tidy(now=NOW + DAY_S)
    assert contents(read(tmp_path, now=NOW)) == contents([long])  # the others are gone
    log.tidy(now=NOW + 2 * DAY_S)
    assert files(tmp_path) == []


def test_all_of_a_tenant_can_be_deleted_and_of_no_other(tmp_path: Path) -> None:
    kept = [passage(tenant="kept", session_id="a"), passage(tenant="kept", session_id="z")]
    gone = passage(tenant="gone", session_id="b")
    log = write(tmp_path, [gone], kept, [kept[0], gone, kept[1]])
    assert TrafficLog(str(tmp_path)).forget("gone") == 2
    log.write([kept[0]])  # its file has lost a row meanwhile
    assert sorted(one.session_id for one in read(tmp_path)) == ["a", "a", "a", "z", "z"]


def test_a_verifiers_recorder_writes_to_the_configured_place_and_tidies_it(tmp_path: Path) -> None:
    place = tmp_path / "log"
    write(place, [passage(time_unix=0.0, expires_unix=1.0)])
    config = VerifierConfig(model=tmp_path, traffic=str(place), traffic_redact=f"{__name__}:nothing_of_5")
    recorder = recorder_of(config, "v7")
    until(lambda: files(place) == [])
    begin(recorder)
    one = pb.RecordedTokens(
        start=2, token=[4, 5], top=1, top_ids=bytes(8), top_log_probs=bytes(4), tail=bytes(4), proposed_depths=b"\1\0"
    )
    recorder.take(pb.EngineEvent(session_id="s", epoch=1, recorded=one))
    recorder.close()
    assert contents(read(place, now=time.time())) == [("s", 2, [4])]
    [path] = files(place)
    assert path.name.startswith("v7-")


def nothing_of_5(tokens, traffic_class, tenant):
    return tokens == 5


def test_the_oldest_go_where_the_log_is_too_large(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        log = write(tmp_path, [passage(1, session_id=str(number), expires_unix=4e9)])
        newest = max(files(tmp_path), key=lambda path: path.stat().st_mtime_ns)
        os.utime(newest, (0, 1e9 + number))
    most = sum(path.stat().st_size for path in files(tmp_path)[1:])
    monkeypatch.setattr(recorder_module, "MAX_BYTES", most)
    with caplog.at_level(logging.WARNING):
        TrafficRecorder(log).close()
    assert "1 of the oldest files were deleted" in caplog.text
    assert sorted(one.session_id for one in read(tmp_path)) == ["1", "2"]
