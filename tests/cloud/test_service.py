"""Test a verifier's front on a real socket, with a scripted engine: admission, messages both ways, and ends."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

import pytest
from logged import errors_logged
from scripted_engine import TARGET, Stream, front, until
from session_messages import directive

from cloud_verifier.config import LIMITS
from cloud_verifier.engine_process import host
from cloud_verifier.front import service
from cloud_verifier.front.revocations import Revocations
from outrider.core.errors import (
    BadRequest,
    Fenced,
    Killed,
    Overloaded,
    PermissionDenied,
    ProtocolViolation,
    Unauthenticated,
    Unavailable,
    VocabularyMismatch,
)
from outrider.core.protocol.messages import SessionLimits
from outrider.wire.ticket import Claims, Target
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import engine_pb2, session_pb2
from outrider.wire.v1.telemetry_pb2 import VerifierTelemetry

SESSION = "/outrider.wire.v1.Verifier/Session"
SAMPLING = session_pb2.Sampling(top_p=1.0, repetition_penalty=1.0)
CLAIMS = Claims("s", "acme", "v1", 10, 19, time.time() + 600, SessionLimits(7, 6, 5, 4), TARGET)


async def ticketed(ticket: bytes) -> Claims:
    if ticket != b"ticket":
        raise Unauthenticated("no ticket")
    return CLAIMS


def stats(**verifier: float) -> engine_pb2.EngineStats:
    return engine_pb2.EngineStats(verifier=VerifierTelemetry(**verifier))


@pytest.fixture
async def plain(tmp_path):
    """Start a front that takes streams without tickets."""
    async with front(tmp_path) as running:
        yield running


# --- coming in


async def test_a_stream_without_an_open_is_ended_in_time(plain, monkeypatch):
    monkeypatch.setattr(service, "OPEN_TIMEOUT_S", 0.05)
    error = await Stream(plain.stub.Session()).refusal()
    assert isinstance(error, Unavailable)  # an Open may be late over a slow line
    assert "no Open came within 0.05 s" in str(error)


@pytest.mark.parametrize(
    ("first", "error", "said"),
    [
        ({"append": session_pb2.Append(first_id=1)}, ProtocolViolation, "the first message is append, must be open"),
        ({}, ProtocolViolation, "the first message is None, must be open"),
        (
            {"open": session_pb2.Open(session_id="s", attach=session_pb2.Attach(epoch=1, prompt=[101], max_tokens=8))},
            BadRequest,
            "attach.prompt is 101, must be less than 101",
        ),
        (
            {
                "open": session_pb2.Open(
                    session_id="s",
                    attach=session_pb2.Attach(epoch=1, prompt=[1], max_tokens=8, sampling=SAMPLING),
                    vocabulary_hash=b"w" * 32,
                )
            },
            VocabularyMismatch,
            (b"w" * 8).hex(),
        ),
    ],
)
async def test_a_first_message_that_is_no_good_open_is_refused_before_the_engine(plain, first, error, said):
    stream = Stream(plain.stub.Session())
    await stream.send(**first)
    refusal = await stream.refusal()
    assert type(refusal) is error
    assert said in str(refusal)
    assert plain.engine.requests == []


@pytest.mark.parametrize("live", [False, True])
async def test_bytes_that_are_no_message_end_their_stream_as_a_bad_request_and_are_no_defect(plain, caplog, live):
    call = plain.channel.stream_stream(SESSION, response_deserializer=session_pb2.ServerMessage.FromString)()
    if live:
        attach = session_pb2.Attach(epoch=1, prompt=[1], max_tokens=8, sampling=SAMPLING)
        opening = session_pb2.ClientMessage(open=session_pb2.Open(session_id="s", attach=attach))
        await call.write(opening.SerializeToString())
        assert (await Stream(call).read()).HasField("opened")
    await call.write(b"\x0a\xff\xff\xff\xff")
    error = await Stream(call).refusal()
    assert type(error) is BadRequest
    assert "cannot be parsed" in str(error)
    assert errors_logged(caplog) == []


async def test_a_full_verifier_refuses_before_the_engine_and_takes_the_next_epoch_of_a_session_that_it_has(tmp_path):
    async with front(tmp_path, max_sessions=1) as running:
        first = await running.open("a", epoch=1)
        error = await (await running.open("b", wait=False)).refusal()
        assert isinstance(error, Overloaded)
        assert "all 1 sessions" in str(error)
        assert error.retry_after_s == 1.0
        assert {request.session_id for request in running.engine.requests} == {"a"}
        again = await running.open("a", epoch=2)
        assert isinstance(await first.refusal(), Fenced)
        again.call.cancel()
        await until(lambda: not running.tenants)
        (await running.open("b")).call.cancel()


# --- tickets


async def test_a_ticket_sets_limits_and_tenant_and_with_it_whose_prefixes_are_shared(tmp_path):
    async with front(tmp_path, authorise=ticketed) as running:
        stream = await running.open(epoch=10, ticket=b"ticket", wait=False)
        assert (await stream.read()).opened.limits.nodes == 7
        start = (await running.engine.asked("start")).start
        assert (start.limits.run_ahead, start.salt) == (4, "acme")
        assert running.tenants == {"s": "acme"}
        await stream.send(append=session_pb2.Append(first_id=1, up=[0] * 6, token=[1, 2, 3, 4, 5, 6]))
        assert "is 6, must be at most 5, limits.in_flight" in str(await stream.refusal())


@pytest.mark.parametrize(("settings", "salt"), [({}, "default"), ({"open_to_all": True}, "s")])
async def test_unauthenticated_sessions_share_their_prefixes_with_nobody(tmp_path, settings, salt):
    async with front(tmp_path, **settings) as running:
        stream = await running.open()
        assert (await running.engine.asked("start")).start.salt == salt
        stream.call.cancel()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"session_id": "another"}, "another session than 's'"),
        ({"target": Target("t", "w2", "k")}, "w2 and k, this verifier serves w and k"),
        ({"epoch_first": 11}, "attach.epoch is 10, must be between 11 and 19"),
        ({"target": Target("another name", "w", "k", dtype="bfloat16")}, ""),
    ],
)
async def test_a_ticket_is_good_for_its_session_target_and_epochs_alone(tmp_path, change, said):
    async def authorise(ticket):
        return replace(CLAIMS, **change)

    async with front(tmp_path, authorise=authorise) as running:
        stream = await running.open(epoch=10, wait=False)
        if not said:
            assert (await stream.read()).HasField("opened")
            return
        error = await stream.refusal()
        assert isinstance(error, PermissionDenied)
        assert said in str(error)
        assert running.engine.requests == []


# --- epochs


async def test_a_newer_epoch_fences_the_older_stream_and_goes_on_alone(plain):
    old = await plain.open(epoch=1)
    new = await plain.open(epoch=2)
    error = await old.refusal()
    assert isinstance(error, Fenced)
    assert "epoch 2 has taken over" in str(error)
    plain.engine.commit("s", 1, 0, [4])  # the old epoch's last words
    plain.engine.commit("s", 2, 0, [5])
    assert await new.tokens() == [5]
    assert plain.tenants == {"s": "default"}
    new.call.cancel()


async def test_neither_logs_nor_errors_hold_the_whole_id_of_a_session(plain, caplog):
    whole = "0123456789abcdef0123456789abcdef"
    with caplog.at_level(logging.DEBUG):
        live = await plain.open(whole, epoch=5)
        late = await (await plain.open(whole, epoch=4, wait=False)).refusal()
        newer = await plain.open(whole, epoch=6)
        fenced = await live.refusal()
        newer.call.cancel()
        await until(lambda: not plain.tenants)
    for text in (str(late), str(fenced), caplog.text):
        assert whole not in text
    assert "epoch of session 01234567 is 4" in str(late)
    assert "epoch 6 has taken over session 01234567" in str(fenced)


# --- while it runs


async def test_a_directive_of_the_coordinator_reaches_engine_and_device_within_the_sessions_limits(plain):
    stream = await plain.open()
    limits = LIMITS
    for session_id, epoch in (("s", 2), ("x", 1)):  # another epoch or session: ignored
        plain.service.live.set_directive(session_id, epoch, directive(window_nodes=1))
    plain.service.live.set_directive(
        "s",
        1,
        directive(window_nodes=10_000, window_depth=10_000, nodes_per_step=4, min_acceptance=0.5, draft_wait_ms=3),
    )
    tuned = (await plain.engine.asked_of("update", lambda update: update.HasField("directive"))).directive
    sent = (await stream.read()).directive
    for one in (tuned, sent):
        assert (one.window_nodes, one.window_depth) == (limits.nodes, limits.depth)
        assert (one.nodes_per_step, one.draft_wait_ms) == (4, 3)
    assert sent.min_acceptance == 0.25  # half of what pays for a row
    stream.call.cancel()


@pytest.mark.parametrize("logprobs", [0, 2])
async def test_the_sizes_of_messages_do_not_tell_how_many_tokens_were_accepted(plain, logprobs):
    session = plain.channel.stream_stream(SESSION, request_serializer=session_pb2.ClientMessage.SerializeToString)
    call = session()  # without a deserializer, it gives the bytes of each message
    attach = session_pb2.Attach(epoch=1, prompt=[1], max_tokens=400, sampling=SAMPLING, logprobs=logprobs)
    await call.write(session_pb2.ClientMessage(open=session_pb2.Open(session_id="s", attach=attach)))
    sizes = [len(await call.read())]
    for count in range(1, 21):
        told = {"logprob": [-1.0] * count, "top_id": [100] * 2 * count, "top_logprob": [-1.0] * 2 * count}
        commit = session_pb2.Commit(epoch=1, token=[100] * count, **(told if logprobs else {}))
        plain.engine.send("s", 1, commit=commit)
        sizes.append(len(await call.read()))
    call.cancel()
    assert len(set(sizes)) == 1


# --- ends by order


@pytest.mark.parametrize("closed", [False, True])
async def test_a_session_that_was_killed_or_closed_frees_its_place_at_once_and_ends_alone(plain, closed):
    stream, other = await plain.open(), await plain.open("other")
    revocations = Revocations()
    if not closed:
        killed = pb.Revocation(session_id="s", until_unix=time.time() + 60)
        revocations.learn(pb.ReportResponse(revocations=[killed]), 0.0)
    plain.engine.commit("s", 1, 0, [5, 6])
    plain.engine.send(stats=stats(step_ms=0.5))
    await until(lambda: plain.host.stats.verifier.step_ms == 0.5)  # the commit has reached the front
    assert plain.service.live.end_revoked(revocations, ["s"] if closed else [])
    assert plain.tenants == {"other": "default"}  # though its device has read nothing
    assert (await plain.engine.asked("stop")).session_id == "s"
    assert not plain.service.live.end_revoked(revocations, ["nobody"])
    assert await stream.tokens() == [5, 6]
    assert isinstance(await stream.refusal(), PermissionDenied if closed else Killed)
    plain.engine.commit("other", 1, 0, [7])
    assert await other.tokens() == [7]
    other.call.cancel()


# --- heartbeats


async def test_the_round_trip_of_a_ping_is_measured_once_and_reaches_the_engine(tmp_path):
    news = []
    async with front(tmp_path, on_first_rtt=lambda: news.append("known")) as running:
        stream = await running.open()
        ping = await stream.ping()
        await asyncio.sleep(0.03)
        for nonce in (ping.nonce, ping.nonce, 12345):  # it is believed once
            await stream.send(pong=session_pb2.Pong(nonce=nonce, draft_ms=1.5))
        update = (await running.engine.asked("update")).update
        assert update.rtt_ms >= 30.0
        served = running.service.live.streams["s"]
        assert (served.rtt_ms, served.draft_ms) == (update.rtt_ms, 1.5)
        assert news == ["known"]
        stream.call.cancel()


@pytest.mark.parametrize("life", [None, session_pb2.Pong(nonce=12345)])
async def test_a_device_that_answers_no_ping_is_gone_in_time(tmp_path, life):
    async with front(tmp_path, silence_s=0.15) as running:
        stream = await running.open()
        if life is not None:
            await stream.send(pong=life)
        else:
            await stream.call.done_writing()
        error = await stream.refusal()
        assert isinstance(error, Unavailable)
        assert "the device has been silent for 0.15 s; attach again" in str(error)
        await running.engine.asked("stop")


async def test_a_device_that_reads_nothing_loses_its_place(tmp_path):
    async with front(tmp_path, silence_s=0.15) as running:
        _, writer = await asyncio.open_connection("127.0.0.1", running.port)
        attach = session_pb2.Attach(epoch=1, prompt=[1], max_tokens=8, sampling=SAMPLING)
        writer.write(session_without_window(session_pb2.Open(session_id="s", attach=attach)))
        await until(lambda: running.tenants)
        await running.engine.asked("stop")
        assert running.tenants == {}
        writer.close()


def session_without_window(opening: session_pb2.Open) -> bytes:
    """Open a Session in HTTP/2 frames whose peer may send no byte of an answer: the initial window is 0."""

    def frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
        return len(body).to_bytes(3) + bytes([kind, flags]) + stream.to_bytes(4) + body

    def header(name: bytes, value: bytes) -> bytes:
        return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value

    headers = {b":method": b"POST", b":scheme": b"http", b":path": SESSION.encode(), b":authority": b"v"}
    headers |= {b"te": b"trailers", b"content-type": b"application/grpc"}
    message = session_pb2.ClientMessage(open=opening).SerializeToString()
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + frame(4, 0, 0, (4).to_bytes(2) + (0).to_bytes(4))
        + frame(1, 4, 1, b"".join(header(*pair) for pair in headers.items()))
        + frame(0, 0, 1, b"\0" + len(message).to_bytes(4) + message)
    )


# --- the engine


@pytest.mark.parametrize("alive", [None, engine_pb2.Alive(expected_s=1.0)])
async def test_an_engine_that_is_silent_or_only_says_that_it_runs_is_given_up(tmp_path, monkeypatch, alive):
    monkeypatch.setattr(host, "SILENCE_S", 0.3)
    async with front(tmp_path) as running:
        stream = await running.open()

        async def keep_saying() -> None:
            while alive is not None:
                running.engine.send(alive=alive)
                await asyncio.sleep(0.05)

        saying = asyncio.create_task(keep_saying())
        error = await stream.refusal()
        assert isinstance(error, Unavailable)
        assert "engine process has ended" in str(error)
        assert running.host.ended.is_set()
        saying.cancel()
