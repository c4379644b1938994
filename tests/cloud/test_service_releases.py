"""Test a session's draft release at the verifier's front: its announcement, its recording, and news of others."""

from __future__ import annotations

import dataclasses
import logging
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow.parquet as pq
import pytest
from scripted_engine import TARGET, VOCABULARY, Stream, front, until
from session_messages import attach

from cloud_verifier.traffic import recorder as recorder_module
from cloud_verifier.traffic.log import TrafficLog
from cloud_verifier.traffic.recorder import TrafficRecorder
from cloud_verifier.verifier import _report_of
from outrider.core.protocol.messages import SessionLimits, sampling_of
from outrider.core.sampling import SamplingParams, TypicalAcceptance
from outrider.wire.ticket import Claims
from outrider.wire.v1 import engine_pb2, session_pb2
from outrider.wire.v1.telemetry_pb2 import SessionTelemetry

CLAIMS = Claims(
    "s",
    "acme",
    "v1",
    1,
    99,
    time.time() + 60,
    SessionLimits(),
    TARGET,
    draft_release="r1",
    traffic_class="code",
    keep_s=3600.0,
)


def allowing(**changes: Any):
    """Admit every session with these claims."""

    async def authorise(ticket: bytes) -> Claims:
        return dataclasses.replace(CLAIMS, **changes)

    return authorise


def whole(start: int, tokens: list[int]) -> engine_pb2.RecordedTokens:
    """Return some tokens, with one id each for a distribution."""
    ids, halves = np.array(tokens, "<u4").tobytes(), np.zeros(len(tokens), "<f2").tobytes()
    return engine_pb2.RecordedTokens(
        start=start,
        token=tokens,
        top=1,
        top_ids=ids,
        top_log_probs=halves,
        tail=halves,
        proposed_depths=bytes(len(tokens)),
    )


# --- what is recorded


async def test_a_session_with_a_lossy_rule_is_not_recorded_and_the_log_says_that_it_is_lossy(tmp_path, caplog):
    recorder, lossy = mock.Mock(), SamplingParams(typical=TypicalAcceptance())
    with caplog.at_level(logging.INFO, "cloud_verifier.front.service"):
        async with front(tmp_path, authorise=allowing(), recorder=recorder) as running:
            stream = await running.open(sampling=lossy)
            start = (await running.engine.asked("start")).start
            assert not start.record
            assert sampling_of(start.attach.sampling) == lossy
            stream.call.cancel()
            await until(lambda: not running.tenants)
    assert not recorder.begin.called
    assert "stream of epoch 1 is lossy: its acceptance rule is typical" in caplog.messages


def ids_on_disk(place: Path) -> set[int]:
    """Return every integer in every column of every file."""
    found: set[int] = set()
    for path in place.rglob("*.parquet"):
        for column in pq.read_table(path).columns:
            while hasattr(column.type, "value_type"):
                column = column.combine_chunks().flatten()
            found |= {value for value in column.to_pylist() if isinstance(value, int)}
    return found


@pytest.mark.parametrize(
    ("consent", "prompt_tokens", "kept"),
    [
        ({"keep_prompts": False}, 2_048, set()),
        ({"keep_prompts": True}, 2, {VOCABULARY - 2, VOCABULARY - 1}),
    ],
)
async def test_no_id_of_a_client_reaches_the_disk_but_of_a_prompt_that_may_be_kept(
    tmp_path, monkeypatch, consent, prompt_tokens, kept
):
    asked = tuple(range(VOCABULARY - 3, VOCABULARY))
    received = tuple(range(VOCABULARY - 6, VOCABULARY - 3))
    log = tmp_path / "log"
    monkeypatch.setattr(recorder_module, "PROMPT_TOKENS", prompt_tokens)
    recorder = TrafficRecorder(TrafficLog(str(log)))
    async with front(tmp_path, authorise=allowing(**consent), recorder=recorder) as running:
        running.host.on_recorded = recorder.take
        stream = Stream(running.stub.Session())
        opening = session_pb2.Open(session_id="s", attach=attach(1, asked, tokens=received, max_tokens=32))
        await stream.send(open=opening)
        await running.engine.asked("start", 1)
        for start in (0, len(received)):  # a sound engine does not send the first
            running.engine.send("s", 1, recorded=whole(start, [4]))
        running.engine.commit("s", 1, len(received), [4])
        while (await stream.read()).WhichOneof("kind") != "commit":
            pass
        recorder.close()
        stream.call.cancel()
    clients = set(asked) | set(received)
    assert ids_on_disk(log) & clients == kept
    assert (4 in ids_on_disk(log)) == (consent.get("keep_s") != 0.0)


async def test_a_report_has_the_draft_the_class_and_the_acceptance_of_sessions_that_are_here(tmp_path):
    async with front(tmp_path, authorise=allowing()) as running:
        stream = await running.open()
        live = SessionTelemetry(session_id="s", epoch=1, draft_release="r2", positions=40, first_accepted=31)
        gone = SessionTelemetry(session_id="gone", epoch=1, positions=9)
        earlier = SessionTelemetry(session_id="s", epoch=0, positions=9)
        running.engine.send(stats=engine_pb2.EngineStats(sessions=[live, gone, earlier]))
        await until(lambda: len(running.host.stats.sessions) == 3)
        [report] = _report_of(running.service, running.host).sessions
        assert (report.session_id, report.tenant, report.traffic_class) == ("s", "acme", "code")
        assert (report.draft_release, report.positions, report.first_accepted) == ("r2", 40, 31)
        stream.call.cancel()


# --- news of releases
