"""Test that the recorder writes recorded sessions alone, in time, and delays nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event

import numpy as np
import pytest
from passages import NOW, begin, contents

from cloud_verifier.engine.recording import put_distributions
from cloud_verifier.traffic import recorder as module
from cloud_verifier.traffic.log import TrafficLog
from cloud_verifier.traffic.passage import Passage
from cloud_verifier.traffic.passage_builder import RecordingCounts
from cloud_verifier.traffic.recorder import TrafficRecorder
from outrider.wire.v1 import engine_pb2 as pb


class Disk:
    """Act as a log that keeps what it is given, refuses it, or hangs."""

    def __init__(self) -> None:
        self.written: list[Passage] = []
        self.asked = self.flushes = 0
        self.full = False
        self.go_on = Event()
        self.go_on.set()

    def write(self, passages: list[Passage]) -> None:
        self.asked += len(passages)
        self.go_on.wait(60)
        if self.full:
            raise OSError("no space left")
        self.flushes += bool(passages)
        self.written += passages

    def tidy(self, max_bytes: float) -> int:
        return 0


def recorded(start: int, tokens: list[int], session_id: str = "s", epoch: int = 1, draft: str = "ab") -> pb.EngineEvent:
    """Return the engine's event of one step."""
    n = len(tokens)
    ids = np.arange(n * 2, dtype=np.uint32).reshape(n, 2)
    distributions = ids, np.full((n, 2), -0.5, np.float32), np.full(n, 0.25, np.float32)
    one = pb.RecordedTokens(start=start, token=tokens, proposed_depths=bytes(range(n)), draft_release=draft)
    event = pb.EngineEvent(session_id=session_id, epoch=epoch, recorded=one)
    put_distributions(event, *distributions)
    return event


def until(condition: Callable[[], object]) -> None:
    give_up = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.005)


def texts(disk: Disk) -> list[tuple[str, int, list[int]]]:
    return contents(disk.written)


def test_what_the_engine_produced_is_written_unchanged() -> None:
    disk = Disk()
    recorder = TrafficRecorder(disk, clock=lambda: NOW)
    begin(recorder)
    recorder.take(recorded(7, [5, 6]))
    recorder.take(recorded(9, [4]))
    recorder.close()
    [one] = disk.written
    assert (one.session_id, one.tenant, one.traffic_class, one.weights_hash) == ("s", "acme", "code", "sha256:cd")
    assert (one.draft_release, one.temperature, one.start, one.tokens.tolist()) == ("ab", 0.7, 7, [5, 6, 4])
    assert (one.time_unix, one.expires_unix) == (NOW, NOW + 60.0)
    assert one.top_ids.tolist() == [[0, 1], [2, 3], [0, 1]]
    assert one.top_log_probs.tolist() == [[-0.5, -0.5]] * 3
    assert (one.tail.tolist(), one.proposed_depths.tolist()) == ([0.25] * 3, [0, 1, 0])
    assert recorder.counts == RecordingCounts(recorded=3)


def test_a_prompt_is_written_with_the_texts_beginning_alone_and_only_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROMPT_TOKENS", 3)
    disk = Disk()
    recorder = TrafficRecorder(disk)
    for epoch, session_id in enumerate(("whole", "resumed"), 1):
        begin(recorder, session_id, epoch, prompt=[91, 92, 93, 94])
    recorder.take(recorded(0, [5], session_id="whole", epoch=1))
    recorder.take(recorded(1, [6], session_id="whole", epoch=1))
    recorder.take(recorded(9, [5], session_id="resumed", epoch=2))
    recorder.close()
    assert {one.session_id: one.prompt.tolist() for one in disk.written} == {"whole": [92, 93, 94], "resumed": []}


def test_the_last_words_of_a_session_that_has_ended_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SESSIONS", 1)
    disk = Disk()
    recorder = TrafficRecorder(disk)
    for session_id in ("s", "t"):
        begin(recorder, session_id)
    recorder.take(recorded(0, [4], session_id="s"))  # too long ago
    recorder.take(recorded(0, [5], session_id="t"))
    recorder.close()
    assert texts(disk) == [("t", 0, [5])]
    assert len(recorder._sessions) == 1


def test_what_is_recorded_is_written_in_time_or_when_there_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FLUSH_TOKENS", 3)
    disk = Disk()
    recorder = TrafficRecorder(disk, flush_s=0.1)
    begin(recorder)
    recorder.take(recorded(0, [5]))
    until(lambda: disk.flushes == 1)
    recorder.close()

    disk = Disk()
    recorder = TrafficRecorder(disk, flush_s=60.0)
    begin(recorder)
    recorder.take(recorded(0, [5, 6]))
    recorder.take(recorded(2, [7]))
    until(lambda: texts(disk) == [("s", 0, [5, 6, 7])])
    recorder.close()


RECORDING = """
import itertools, sys, time
sys.path.append(sys.argv[2])
from cloud_verifier.traffic.recorder import TrafficRecorder
from cloud_verifier.traffic.log import TrafficLog
from outrider.wire.v1 import engine_pb2 as pb
from passages import begin
recorder = TrafficRecorder(TrafficLog(sys.argv[1]), flush_s=0.2)
begin(recorder)
for start in itertools.count():
    token = dict(token=[start], top=1, top_ids=bytes(4), top_log_probs=bytes(2), tail=bytes(2), proposed_depths=b"0")
    recorder.take(pb.EngineEvent(session_id="s", epoch=1, recorded=pb.RecordedTokens(start=start, **token)))
    time.sleep(0.005)
"""


def test_what_a_killed_recorder_has_written_stays_whole(tmp_path: Path) -> None:
    def kept() -> list[int]:
        return [token for one in TrafficLog(str(tmp_path)).read() for token in one.tokens.tolist()]

    command = [sys.executable, "-c", RECORDING, str(tmp_path), str(Path(__file__).parent)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        for _ in range(3):  # each flush writes what came since the last one
            before = len(kept())
            until(lambda before=before: len(kept()) > before)
        process.kill()
    after = kept()
    assert after == list(range(len(after))) and len(after) > before


def test_a_disk_that_hangs_delays_no_session_and_dropped_tokens_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BACKLOG", 8)
    monkeypatch.setattr(module, "FLUSH_TOKENS", 1)
    disk = Disk()
    disk.go_on.clear()
    recorder = TrafficRecorder(disk)
    begin(recorder)
    recorder.take(recorded(0, [1]))
    until(lambda: disk.asked == 1)
    for start in range(1, 101):
        recorder.take(recorded(start, [1]))
    disk.go_on.set()
    recorder.close()
    assert recorder.counts == RecordingCounts(recorded=9, dropped=92)


def test_while_too_much_waits_for_the_hook_only_sessions_that_are_recorded_already_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "WAITING_TOKENS", 2)
    disk = Disk()
    recorder = TrafficRecorder(disk, redact=lambda tokens, *_: np.zeros(len(tokens), bool), clock=lambda: NOW)
    begin(recorder)
    recorder.take(recorded(0, [1, 2, 3]))
    until(lambda: recorder._passages.waiting == 3)
    begin(recorder, "t")
    recorder.take(recorded(0, [7], session_id="t"))
    begin(recorder, epoch=2)
    recorder.take(recorded(3, [4], epoch=2))
    recorder.close()
    assert texts(disk) == [("s", 0, [1, 2, 3, 4])]
    assert recorder._passages.waiting == 0


def test_a_disk_that_is_full_is_tried_again_and_what_it_never_takes_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "FLUSH_TOKENS", 1)
    monkeypatch.setattr(module, "UNWRITTEN_TOKENS", 3)
    disk = Disk()
    disk.full = True
    recorder = TrafficRecorder(disk)
    begin(recorder)
    for start in range(4):
        recorder.take(recorded(start, [start]))
        until(lambda start=start: disk.asked == (start + 1) * (start + 2) // 2)
    until(lambda: recorder.counts.dropped == 4)
    recorder.take(recorded(4, [4]))
    until(lambda: disk.asked == 11)
    disk.full = False
    recorder.close()
    assert recorder.counts == RecordingCounts(recorded=1, dropped=4) and texts(disk) == [("s", 4, [4])]
