"""Test that a growing log is tidied, by several processes at once if need be."""

from __future__ import annotations

import logging
import time
from pathlib import Path

import pytest
from passages import contents, passage
from test_traffic_segments import files, write

from cloud_verifier.config import VerifierConfig
from cloud_verifier.traffic.passage import Passage
from cloud_verifier.traffic.recorder import MANY, RecordedSession, keep_tidy, recorder_of
from cloud_verifier.traffic.segments import SegmentLog
from outrider.wire.v1 import engine_pb2 as pb

HOUR_S = 3600.0


def seconds(count: int, begin: float) -> list[Passage]:
    return [passage(3, seed=i, start=3 * i, time_unix=begin + i, expires_unix=begin + HOUR_S) for i in range(count)]


def until(condition) -> None:
    give_up = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_what_has_expired_goes_and_many_small_segments_become_one(tmp_path: Path) -> None:
    today = time.time() // 86_400 * 86_400  # so that all are of one day
    written = [passage(1, time_unix=p.time_unix, start=p.start, expires_unix=4e9) for p in seconds(MANY, today)]
    write(tmp_path, *([one] for one in written), [passage(session_id="old", expires_unix=1.0, time_unix=0.0)])
    stop = keep_tidy(SegmentLog(str(tmp_path)), max_bytes=1 << 30)
    until(lambda: len(files(tmp_path)) == 1)
    stop()
    assert contents(list(SegmentLog(str(tmp_path)).read())) == contents(written)


def test_the_oldest_go_where_the_log_is_too_large(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    written = [passage(1, time_unix=1e9 + i, expires_unix=4e9) for i in range(3)]
    write(tmp_path, *([one] for one in written))
    most = sum(path.stat().st_size for path in files(tmp_path)[1:])
    with caplog.at_level(logging.WARNING):
        stop = keep_tidy(SegmentLog(str(tmp_path)), max_bytes=most)
        until(lambda: "1 of the oldest segments were deleted" in caplog.text)
    stop()
    assert contents(list(SegmentLog(str(tmp_path)).read())) == contents(written[1:])


def test_a_verifiers_recorder_writes_to_the_configured_place(tmp_path: Path) -> None:
    config = VerifierConfig(model=tmp_path, traffic=str(tmp_path / "log"), traffic_redact=f"{__name__}:nothing_of_5")
    recorder = recorder_of(config, "v7")
    recorder.begin(RecordedSession("s", "acme", "code", "w", 0.0, 60.0), 1)
    one = pb.RecordedTokens(
        start=2, token=[4, 5], top=1, top_ids=bytes(8), top_log_probs=bytes(4), tail=bytes(4), proposed_depths=b"\1\0"
    )
    recorder.take(pb.EngineEvent(session_id="s", epoch=1, recorded=one))
    recorder.close()
    assert contents(list(SegmentLog(str(tmp_path / "log")).read())) == [("s", 2, [4])]
    [path] = files(tmp_path / "log")
    assert "-v7-" in path.name


def nothing_of_5(tokens, traffic_class, tenant):
    return tokens == 5
