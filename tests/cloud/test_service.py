"""Test a verifier's front on a real socket, with a scripted engine: admission, messages both ways, and ends."""

from __future__ import annotations

import asyncio
import logging
import time

import grpc
import pytest
from logged import errors_logged
from scripted_engine import TARGET, VOCABULARY, VOCABULARY_HASH, Stream, front, until
from tcp_server import serving

from cloud_verifier.config import VerifierConfig
from cloud_verifier.front import directives
from cloud_verifier.front.revocations import Revocations
from outrider.core.errors import (
    BadRequest,
    Draining,
    Fenced,
    Killed,
    Overloaded,
    PermissionDenied,
    ProtocolViolation,
    Unauthenticated,
    Unavailable,
    VocabularyMismatch,
)
from outrider.core.protocol.messages import Directive, SessionLimits
from outrider.wire import channels
from outrider.wire.status import error_from_rpc
from outrider.wire.ticket import Claims, Target
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import engine_pb2, session_pb2, session_pb2_grpc
from outrider.wire.v1.telemetry_pb2 import VerifierTelemetry

SESSION = "/outrider.wire.v1.Verifier/Session"
SAMPLING = session_pb2.Sampling(top_p=1.0, repetition_penalty=1.0)


def claims(session_id: str = "s", first: int = 10, last: int = 19, target: Target = TARGET) -> Claims:
    return Claims(session_id, "acme", "v1", first, last, time.time() + 60, SessionLimits(7, 6, 5, 4), target)


@pytest.fixture
async def plain(tmp_path):
    """Start a front that takes streams without tickets."""
    async with front(tmp_path, ping_interval_s=0.05) as running:
        yield running


# --- coming in


async def test_requests_of_one_turn_of_the_loop_reach_the_engine_in_order_and_in_one_write(plain, monkeypatch):
    writes = []
    write = plain.host._writer.write
    monkeypatch.setattr(plain.host._writer, "write", lambda data: (writes.append(data), write(data)))
    names = [f"s{number}" for number in range(20)]
    for name in names:
        plain.host.send(engine_pb2.EngineRequest(session_id=name, stop=engine_pb2.Stop()))
    await until(lambda: len(plain.engine.requests) == 20)
    assert [request.session_id for request in plain.engine.requests] == names
    assert len(writes) == 1


async def test_pings_keep_their_pace_however_many_commits_come_between(plain):
    stream = await plain.open()
    kinds, begun = [], time.monotonic()
    while (passed_s := time.monotonic() - begun) < 0.6:
        plain.engine.commit("s", 1, len(kinds), [1])
        kinds.append((await stream.read(pings=True)).WhichOneof("kind"))
        await asyncio.sleep(0.002)
    assert 3 <= kinds.count("ping") <= 1 + passed_s / 0.05
    assert kinds.count("commit") > 10
    stream.call.cancel()


async def test_an_open_is_answered_with_limits_and_directive_and_reaches_the_engine(plain):
    stream = await plain.open(wait=False)
    opened = (await stream.read()).opened
    assert (opened.epoch, opened.verifier_id, opened.vocabulary_size) == (1, "v1", 101)
    assert opened.limits.nodes == 64
    start = await plain.engine.asked("start")
    assert (start.session_id, start.epoch, list(start.start.attach.prompt)) == ("s", 1, [1, 2, 3])
    stream.call.cancel()


async def test_a_stream_without_an_open_is_ended_in_time(tmp_path, monkeypatch):
    monkeypatch.setattr("cloud_verifier.front.service.OPEN_TIMEOUT_S", 0.1)
    async with front(tmp_path) as running:
        error = await Stream(running.stub.Session()).refusal()
    assert isinstance(error, Unavailable)  # an Open may be late over a slow line
    assert "no Open came within 0.1 s" in str(error)


async def test_a_stream_that_is_closed_without_an_open_gets_an_error_that_says_so(plain):
    stream = Stream(plain.stub.Session())
    await stream.call.done_writing()
    assert "ended before its Open" in str(await stream.refusal())


@pytest.mark.parametrize(
    "first",
    [
        session_pb2.ClientMessage(append=session_pb2.Append(first_id=1)),
        session_pb2.ClientMessage(pong=session_pb2.Pong(nonce=1)),
        session_pb2.ClientMessage(),
    ],
)
async def test_a_first_message_that_is_no_open_is_refused(plain, first):
    stream = Stream(plain.stub.Session())
    await stream.call.write(first)
    error = await stream.refusal()
    assert isinstance(error, ProtocolViolation)
    assert f"the first message is {first.WhichOneof('kind')}, must be open" in str(error)
    assert plain.engine.requests == []


async def test_a_first_message_that_is_no_message_is_a_bad_request_and_no_defect(plain, caplog):
    call = plain.channel.stream_stream(SESSION, response_deserializer=session_pb2.ServerMessage.FromString)()
    await call.write(b"\xff" * 9)
    error = await Stream(call).refusal()
    assert type(error) is BadRequest
    assert "cannot be parsed" in str(error)
    assert errors_logged(caplog) == []
    assert plain.engine.requests == []


async def test_bytes_that_are_no_message_end_a_live_stream_as_a_bad_request(plain, caplog):
    call = plain.channel.stream_stream(SESSION, response_deserializer=session_pb2.ServerMessage.FromString)()
    stream, attach = Stream(call), session_pb2.Attach(epoch=1, prompt=[1], max_tokens=8, sampling=SAMPLING)
    opening = session_pb2.ClientMessage(open=session_pb2.Open(session_id="s", attach=attach))
    await call.write(opening.SerializeToString())
    assert (await stream.read()).HasField("opened")
    await call.write(b"\x0a\xff\xff\xff\xff")
    assert type(await stream.refusal()) is BadRequest
    assert errors_logged(caplog) == []
    await plain.engine.asked("stop")


async def test_an_open_out_of_bounds_is_refused_by_field_value_and_bound(plain):
    stream = Stream(plain.stub.Session())
    attach = session_pb2.Attach(epoch=1, prompt=[5, 101], max_tokens=8)
    await stream.send(open=session_pb2.Open(session_id="s", attach=attach))
    error = await stream.refusal()
    assert isinstance(error, BadRequest)
    assert "attach.prompt is 101, must be less than 101" in str(error)


async def test_another_token_table_is_refused_before_anything_is_drafted(plain):
    stream = await plain.open(wait=False, vocabulary_hash=b"w" * 32)
    error = await stream.refusal()
    assert isinstance(error, VocabularyMismatch)
    assert (b"w" * 8).hex() in str(error)
    assert plain.engine.requests == []


async def test_the_same_token_table_is_let_in(plain):
    stream = await plain.open(vocabulary_hash=VOCABULARY_HASH)
    assert plain.tenants == {"s": "default"}
    stream.call.cancel()


async def test_a_draining_verifier_refuses_new_streams_and_keeps_the_old(plain):
    old = await plain.open("old")
    plain.service.live.draining = True
    error = await (await plain.open("new", wait=False)).refusal()
    assert isinstance(error, Draining)
    plain.engine.commit("old", 1, 0, [5])
    assert list((await old.read()).commit.token) == [5]
    old.call.cancel()


async def test_a_hand_over_sends_what_was_committed_and_then_names_the_reason(plain):
    stream = await plain.open()
    plain.engine.commit("s", 1, 0, [5, 6])
    plain.engine.send(stats=engine_pb2.EngineStats(verifier=VerifierTelemetry(step_ms=0.5)))
    await until(lambda: plain.host.stats.verifier.step_ms == 0.5)  # the commit has reached the front
    plain.service.live.draining = True
    plain.service.live.hand_over()
    commits = []
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        while True:
            message = await stream.read()
            commits += message.commit.token
    error = error_from_rpc(ended.value)
    assert commits == [5, 6]
    assert isinstance(error, Draining)
    assert "resume on another verifier" in str(error)
    await asyncio.wait_for(plain.service.live.finished(), 5)


def revoking(kind: str, name: str) -> Revocations:
    revocations = Revocations()
    revocations.learn(pb.ReportResponse(revocations=[pb.Revocation(**{kind: name}, until_unix=time.time() + 60)]), 0.0)
    return revocations


async def test_a_session_that_its_device_has_closed_ends_and_its_ticket_with_it(plain):
    stream, other = await plain.open(), await plain.open("other")
    revocations = Revocations()
    assert plain.service.live.end_revoked(revocations, ["s"])
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        while True:
            await stream.read()
    assert isinstance(error_from_rpc(ended.value), PermissionDenied)
    plain.engine.commit("other", 1, 0, [7])
    message = await other.read()
    while not message.HasField("commit"):  # a directive may come first
        message = await other.read()
    assert list(message.commit.token) == [7]
    other.call.cancel()


async def test_a_killed_session_gets_what_was_committed_and_then_a_final_error(plain):
    stream, other = await plain.open(), await plain.open("other")
    plain.engine.commit("s", 1, 0, [5, 6])
    plain.engine.send(stats=engine_pb2.EngineStats(verifier=VerifierTelemetry(step_ms=0.5)))
    await until(lambda: plain.host.stats.verifier.step_ms == 0.5)  # the commit has reached the front
    assert plain.service.live.end_revoked(revoking("session_id", "s"), ())
    commits = []
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        while True:
            commits += (await stream.read()).commit.token
    error = error_from_rpc(ended.value)
    assert commits == [5, 6]
    assert isinstance(error, Killed)
    assert "operator" in str(error)
    plain.engine.commit("other", 1, 0, [7])
    message = await other.read()
    while not message.HasField("commit"):  # a directive may come first
        message = await other.read()
    assert list(message.commit.token) == [7]
    other.call.cancel()


async def test_the_place_of_a_killed_session_is_free_though_its_device_reads_nothing(tmp_path):
    async with front(tmp_path, max_sessions=1) as running:
        silent = await running.open("s")
        assert running.service.live.end_revoked(revoking("session_id", "s"), ())
        assert running.tenants == {}
        assert (await running.engine.asked("stop")).session_id == "s"
        assert not running.service.live.end_revoked(revoking("session_id", "s"), ["nobody"])
        next_one = await running.open("t")
        for stream in (silent, next_one):
            stream.call.cancel()


async def test_a_stream_that_was_let_in_while_the_drain_began_is_refused_still(tmp_path):
    asked, go = asyncio.Event(), asyncio.Event()

    async def authorise(ticket):
        asked.set()
        await go.wait()

    async with front(tmp_path, authorise=authorise) as running:
        stream = await running.open(wait=False)
        await asyncio.wait_for(asked.wait(), 5)
        running.service.live.draining = True
        go.set()
        assert isinstance(await stream.refusal(), Draining)
        assert running.engine.requests == []


async def test_a_full_verifier_refuses_before_the_engine_and_says_when_to_ask_again(tmp_path):
    async with front(tmp_path, max_sessions=2) as running:
        first, second = await running.open("a"), await running.open("b")
        error = await (await running.open("c", wait=False)).refusal()
        assert isinstance(error, Overloaded)
        assert "all 2 sessions" in str(error)
        assert error.retry_after_s == 1.0
        assert {request.session_id for request in running.engine.requests} == {"a", "b"}
        first.call.cancel()
        await until(lambda: "a" not in running.tenants)
        third = await running.open("c", wait=False)
        assert (await third.read()).HasField("opened")
        for stream in (second, third):
            stream.call.cancel()


async def test_a_full_verifier_takes_the_next_epoch_of_a_session_that_it_has(tmp_path):
    async with front(tmp_path, max_sessions=1) as running:
        old = await running.open("a", epoch=1)
        new = await running.open("a", epoch=2)
        assert isinstance(await old.refusal(), Fenced)
        assert isinstance(await (await running.open("b", wait=False)).refusal(), Overloaded)
        new.call.cancel()


async def test_a_device_without_a_ticket_is_refused_for_that_even_if_the_verifier_is_full(tmp_path):
    async def authorise(ticket):
        if ticket != b"ticket":
            raise Unauthenticated("no ticket")
        return claims()

    async with front(tmp_path, authorise=authorise, max_sessions=1) as running:
        stream = await running.open(epoch=10, ticket=b"ticket")
        assert isinstance(await (await running.open("x", epoch=10, wait=False)).refusal(), Unauthenticated)
        stream.call.cancel()


async def test_a_device_gets_a_directive_when_step_time_or_min_acceptance_has_changed_by_much(plain):
    stream = await plain.open()
    plain.engine.send(stats=engine_pb2.EngineStats(verifier=VerifierTelemetry(step_ms=12.0)))

    assert (await stream.read()).directive.step_ms == 12.0
    plain.engine.send(stats=engine_pb2.EngineStats(verifier=VerifierTelemetry(step_ms=13.0)))
    await until(lambda: plain.host.stats.verifier.step_ms == 13.0)
    plain.engine.send(stats=engine_pb2.EngineStats(verifier=VerifierTelemetry(step_ms=30.0)))
    assert (await stream.read()).directive.step_ms == 30.0  # 13 was too near to 12 to be worth a message
    plain.engine.send(stats=engine_pb2.EngineStats(verifier=VerifierTelemetry(step_ms=30.0, min_acceptance=0.6)))
    assert (await stream.read()).directive.min_acceptance == 0.3  # half of what pays for a row
    plain.engine.send(stats=engine_pb2.EngineStats(verifier=VerifierTelemetry(step_ms=30.0, min_acceptance=0.01)))
    assert (await stream.read()).directive.min_acceptance == 0.1  # the least, by the configuration
    stream.call.cancel()


async def test_a_directive_of_the_coordinator_reaches_engine_and_device_within_the_sessions_limits(plain):
    stream = await plain.open()
    plain.engine.send(stats=engine_pb2.EngineStats(verifier=VerifierTelemetry(step_ms=12.0)))
    assert (await stream.read()).directive.step_ms == 12.0
    limits = VerifierConfig(model="m").limits
    plain.service.live.set_directive("s", 1, Directive(10_000, 10_000, 4, 0.5, 3))
    tuned = (await plain.engine.asked_of("update", lambda update: update.HasField("directive"))).directive
    sent = (await stream.read()).directive
    for directive in (tuned, sent):
        assert (directive.window_nodes, directive.window_depth) == (limits.nodes, limits.depth)
        assert (directive.nodes_per_step, directive.draft_wait_ms) == (4, 3)
    assert (sent.min_acceptance, sent.step_ms) == (
        0.25,
        12.0,
    )  # half of what pays for a row, and the verifier's own step
    stream.call.cancel()


async def test_the_coordinators_word_holds_for_a_while_and_then_the_verifiers_own(plain, monkeypatch):
    monkeypatch.setattr(directives, "DIRECTIVE_TTL_S", 0.2)
    stream = await plain.open()
    plain.service.live.set_directive("s", 1, Directive(4, 4, 4, 0.5, 3))
    assert (await stream.read()).directive.window_nodes == 4
    assert (await stream.read()).directive.window_nodes == VerifierConfig(model="m").window_nodes
    stream.call.cancel()


async def test_a_directive_for_another_epoch_or_session_is_ignored(plain):
    stream = await plain.open()
    for session_id, epoch in (("s", 2), ("x", 1)):
        plain.service.live.set_directive(session_id, epoch, Directive(1, 1, 1, 0.0, 1))
    plain.service.live.set_directive("s", 1, plain.service._config.directive)  # nothing new
    plain.engine.commit("s", 1, 0, [5])
    assert (await stream.read()).WhichOneof("kind") == "commit"
    assert not [r for r in plain.engine.requests if r.HasField("update") and r.update.HasField("directive")]
    stream.call.cancel()


# --- tickets


async def test_a_ticket_sets_limits_and_tenant_and_with_it_whose_prefixes_are_shared(tmp_path):
    async def authorise(ticket):
        assert ticket == b"ticket"
        return claims()

    async with front(tmp_path, authorise=authorise) as running:
        stream = await running.open(epoch=10, ticket=b"ticket", wait=False)
        assert (await stream.read()).opened.limits.nodes == 7
        start = (await running.engine.asked("start")).start
        assert (start.limits.run_ahead, start.salt) == (4, "acme")
        assert running.tenants == {"s": "acme"}
        stream.call.cancel()
        await until(lambda: not running.tenants)


async def test_unauthenticated_sessions_share_their_prefixes_with_nobody(tmp_path):
    for settings, salt in (({}, "default"), ({"open_to_all": True}, "s")):
        async with front(tmp_path, **settings) as running:
            stream = await running.open()
            assert (await running.engine.asked("start")).start.salt == salt
            stream.call.cancel()


async def test_a_ticket_for_another_session_is_refused(tmp_path):
    async def authorise(ticket):
        return claims("another")

    async with front(tmp_path, authorise=authorise) as running:
        error = await (await running.open(epoch=10, wait=False)).refusal()
    assert isinstance(error, PermissionDenied)
    assert "another session than 's'" in str(error)


@pytest.mark.parametrize("target", [Target("t", "w2", "k"), Target("t", "w", "k2")])
async def test_a_ticket_for_other_weights_or_another_tokenizer_is_refused(tmp_path, target):
    async def authorise(ticket):
        return claims(target=target)

    async with front(tmp_path, authorise=authorise) as running:
        error = await (await running.open(epoch=10, wait=False)).refusal()
        assert running.engine.requests == []
    assert isinstance(error, PermissionDenied)
    assert f"{target.weights_hash} and {target.tokenizer_hash}, this verifier serves w and k" in str(error)


async def test_a_ticket_may_call_the_same_target_by_another_name(tmp_path):
    async def authorise(ticket):
        return claims(target=Target("another name", "w", "k", dtype="bfloat16"))

    async with front(tmp_path, authorise=authorise) as running:
        stream = await running.open(epoch=10)
        assert "s" in running.tenants
        stream.call.cancel()


@pytest.mark.parametrize("epoch", [9, 20])
async def test_an_epoch_outside_the_ticket_is_refused(tmp_path, epoch):
    async def authorise(ticket):
        return claims()

    async with front(tmp_path, authorise=authorise) as running:
        error = await (await running.open(epoch=epoch, wait=False)).refusal()
        assert running.engine.requests == []
    assert isinstance(error, PermissionDenied)
    assert f"attach.epoch is {epoch}, must be between 10 and 19" in str(error)


async def test_who_is_not_authorised_never_reaches_the_engine(tmp_path):
    async def authorise(ticket):
        raise Unauthenticated("no")

    async with front(tmp_path, authorise=authorise) as running:
        assert isinstance(await (await running.open(wait=False)).refusal(), Unauthenticated)
        assert running.engine.requests == []


async def test_an_unauthenticated_session_is_refused_before_the_prompt_is_checked(tmp_path):
    async def authorise(ticket):
        raise Unauthenticated("no")

    async with front(tmp_path, authorise=authorise) as running:
        stream = Stream(running.stub.Session())
        await stream.send(open=session_pb2.Open(session_id="s", attach=session_pb2.Attach(epoch=1, prompt=[101])))
        assert isinstance(await stream.refusal(), Unauthenticated)


# --- epochs


async def test_a_newer_epoch_fences_the_older_stream_and_goes_on_alone(plain):
    old = await plain.open(epoch=1)
    new = await plain.open(epoch=2)
    error = await old.refusal()
    assert isinstance(error, Fenced)
    assert "epoch 2 has taken over" in str(error)
    plain.engine.commit("s", 1, 0, [4])  # the old epoch's last words
    plain.engine.commit("s", 2, 0, [5])
    assert list((await new.read()).commit.token) == [5]
    assert plain.tenants == {"s": "default"}
    new.call.cancel()


@pytest.mark.parametrize("epoch", [4, 5])
async def test_an_epoch_that_is_not_newer_is_fenced_and_harms_nobody(plain, epoch):
    live = await plain.open(epoch=5)
    late = await plain.open(epoch=epoch, wait=False)
    error = await late.refusal()
    assert isinstance(error, Fenced)
    assert f"is {epoch}, must be greater than 5" in str(error)
    plain.engine.commit("s", 5, 0, [9])
    assert list((await live.read()).commit.token) == [9]
    assert plain.tenants == {"s": "default"}
    live.call.cancel()


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


async def test_an_epoch_that_a_refused_one_displaced_is_given_back_too(plain):
    old = await plain.open(epoch=1)
    new = await plain.open(epoch=2)
    plain.engine.fail("s", 2, Overloaded("full", retry_after_s=2.0))
    error = await new.refusal()
    assert isinstance(error, Overloaded)
    assert error.retry_after_s == 2.0
    await old.refusal()
    await plain.engine.asked("stop", epoch=1)


# --- while it runs


async def test_appends_are_passed_on_and_commits_come_back(plain):
    stream = await plain.open()
    await stream.send(append=session_pb2.Append(first_id=1, up=[0, 1], token=[4, 5]))
    assert list((await plain.engine.asked("append")).append.token) == [4, 5]
    plain.engine.commit("s", 1, 0, [4, 5, 6])
    assert list((await stream.read()).commit.token) == [4, 5, 6]
    stream.call.cancel()


@pytest.mark.parametrize(
    ("nodes", "said"),
    [
        ({"up": [7], "token": [4]}, "append.up[0] is 7, must be less than 1"),
        ({"up": [0, 2], "token": [4, 5]}, "append.up[1] is 2, must be less than 2"),
        ({"up": [0, 0], "token": [4]}, "length of append.up is 2, must be 1"),
        ({"up": [], "token": [4]}, "length of append.up is 0, must be 1"),
        ({"up": [0], "token": [VOCABULARY]}, f"a token id in append.token is {VOCABULARY}, must be less than"),
    ],
)
async def test_a_hostile_append_ends_its_stream_alone_and_never_reaches_the_engine(plain, nodes, said):
    hostile, neighbour = await plain.open("hostile"), await plain.open("neighbour")
    await hostile.send(append=session_pb2.Append(first_id=1, **nodes))
    error = await hostile.refusal()
    assert isinstance(error, BadRequest)
    assert said in str(error)
    assert not any(request.HasField("append") for request in plain.engine.requests)
    assert (await plain.engine.asked("stop")).session_id == "hostile"
    plain.engine.commit("neighbour", 1, 0, [5])
    assert list((await neighbour.read()).commit.token) == [5]
    neighbour.call.cancel()


async def test_more_nodes_than_may_be_in_flight_are_refused_by_the_front(tmp_path):
    async with front(tmp_path, nodes=0, window_nodes=0, in_flight=3) as running:
        stream = await running.open()
        await stream.send(append=session_pb2.Append(first_id=1, up=[0] * 3, token=[4, 5, 6]))
        await stream.send(append=session_pb2.Append(first_id=1, up=[0] * 4, token=[4, 5, 6, 7]))
        error = await stream.refusal()
        assert isinstance(error, ProtocolViolation)
        assert "nodes in append.token is 4, must be at most 3, limits.in_flight" in str(error)
        assert sum(request.HasField("append") for request in running.engine.requests) == 1


async def test_the_tickets_own_bound_on_nodes_in_flight_counts(tmp_path):
    async def authorise(ticket):
        return claims()

    async with front(tmp_path, authorise=authorise) as running:
        stream = await running.open(epoch=10)
        await stream.send(append=session_pb2.Append(first_id=1, up=[0] * 6, token=[1, 2, 3, 4, 5, 6]))
        assert "is 6, must be at most 5, limits.in_flight" in str(await stream.refusal())


async def test_another_epoch_than_the_streams_is_a_violation(plain):
    stream = await plain.open()
    await stream.send(cancel=session_pb2.Cancel(epoch=2))
    error = await stream.refusal()
    assert isinstance(error, ProtocolViolation)
    assert "cancel.epoch is 2, must be 1, the stream's" in str(error)
    assert not any(request.HasField("cancel") for request in plain.engine.requests)


async def test_a_second_open_is_a_violation(plain):
    stream = await plain.open()
    await stream.send(open=session_pb2.Open(session_id="s"))
    error = await stream.refusal()
    assert isinstance(error, ProtocolViolation)
    assert "kind open" in str(error)


async def test_the_last_commit_ends_the_stream_in_order(plain):
    stream = await plain.open()
    plain.engine.commit("s", 1, 0, [5], finish=session_pb2.FINISH_EOS)
    assert (await stream.read()).commit.finish == session_pb2.FINISH_EOS
    assert await stream.read() is grpc.aio.EOF
    assert plain.tenants == {}
    await plain.engine.asked("stop")


async def test_a_cancel_is_passed_on_and_answered(plain):
    stream = await plain.open()
    await stream.send(cancel=session_pb2.Cancel(epoch=1))
    await plain.engine.asked("cancel")
    plain.engine.commit("s", 1, 0, [], finish=session_pb2.FINISH_CANCELLED)
    assert (await stream.read()).commit.finish == session_pb2.FINISH_CANCELLED


async def test_a_cancel_reaches_the_engine_once(plain):
    stream = await plain.open()
    for _ in range(50):
        await stream.send(cancel=session_pb2.Cancel(epoch=1))
    await stream.send(append=session_pb2.Append(first_id=1))
    await plain.engine.asked("append")
    assert sum(request.WhichOneof("kind") == "cancel" for request in plain.engine.requests) == 1
    stream.call.cancel()


@pytest.fixture
def slow_reading(monkeypatch):
    monkeypatch.setattr("cloud_verifier.front.session_stream.MESSAGES_PER_S", 100.0)
    monkeypatch.setattr("cloud_verifier.front.session_stream.BURST", 10)


async def test_a_stream_that_talks_too_fast_is_read_later_and_loses_nothing(tmp_path, slow_reading):
    def appends(session_id: str) -> int:
        return sum(r.HasField("append") and r.session_id == session_id for r in running.engine.requests)

    async with front(tmp_path) as running:
        loud, neighbour = await running.open("loud"), await running.open("neighbour")
        began = time.monotonic()
        for _ in range(60):
            await loud.send(append=session_pb2.Append(first_id=1))
        await neighbour.send(append=session_pb2.Append(first_id=1))
        await until(lambda: appends("neighbour") == 1)
        assert appends("loud") < 60
        await until(lambda: appends("loud") == 60)
        assert time.monotonic() - began > 0.45
        loud.call.cancel()
        neighbour.call.cancel()


async def test_nodes_count_against_the_rate_limit_of_a_stream(tmp_path, slow_reading):
    def appends() -> int:
        return sum(request.HasField("append") for request in running.engine.requests)

    async with front(tmp_path) as running:
        stream = await running.open()
        began = time.monotonic()
        for _ in range(12):  # 5 of the burst each: the last but two wait
            await stream.send(append=session_pb2.Append(first_id=1, up=[0] * 128, token=[4] * 128))
        await until(lambda: appends() == 12)
        assert time.monotonic() - began > 0.4
        stream.call.cancel()


# --- a device that has closed its side


async def test_a_device_that_has_closed_its_side_receives_until_the_end(plain):
    stream = await plain.open()
    await stream.call.done_writing()
    await stream.read(pings=True)
    plain.engine.commit("s", 1, 0, [5])
    assert list((await stream.read()).commit.token) == [5]
    plain.engine.commit("s", 1, 1, [6], finish=session_pb2.FINISH_LENGTH)
    assert (await stream.read()).commit.finish == session_pb2.FINISH_LENGTH
    assert await stream.read() is grpc.aio.EOF
    assert plain.tenants == {}


async def test_a_cancel_is_answered_after_a_half_close_too(plain):
    stream = await plain.open()
    await stream.send(cancel=session_pb2.Cancel(epoch=1))
    await stream.call.done_writing()
    await plain.engine.asked("cancel")
    plain.engine.commit("s", 1, 0, [], finish=session_pb2.FINISH_CANCELLED)
    assert (await stream.read()).commit.finish == session_pb2.FINISH_CANCELLED
    assert await stream.read() is grpc.aio.EOF


async def test_a_device_that_has_closed_its_side_gets_an_error_when_its_time_is_up(tmp_path):
    async with front(tmp_path, ping_interval_s=0.05, silence_timeout_s=0.3) as running:
        stream = await running.open()
        await stream.call.done_writing()
        error = await stream.refusal()
        assert isinstance(error, Unavailable)
        assert "attach again" in str(error)
        await running.engine.asked("stop")


async def test_a_device_that_disconnects_is_given_up_at_once(plain):
    stream = await plain.open()
    stream.call.cancel()
    assert (await plain.engine.asked("stop")).session_id == "s"
    await until(lambda: not plain.tenants)


# --- heartbeats


async def test_pings_come_by_themselves_and_their_answers_are_measured(plain):
    stream = await plain.open()
    ping = (await stream.read(pings=True)).ping
    await asyncio.sleep(0.03)
    await stream.send(pong=session_pb2.Pong(nonce=ping.nonce))
    update = (await plain.engine.asked("update")).update
    assert 30.0 <= update.rtt_ms < 1000.0
    assert plain.service.live.streams["s"].heartbeat.rtt_ms == update.rtt_ms
    stream.call.cancel()


async def test_one_late_answer_is_a_queue_and_two_are_a_longer_path(tmp_path):
    async with front(tmp_path, ping_interval_s=0.1) as running:
        stream = await running.open()
        for late_s in (0.0, 0.2, 0.2):
            ping = (await stream.read(pings=True)).ping
            await asyncio.sleep(late_s)
            await stream.send(pong=session_pb2.Pong(nonce=ping.nonce))
        await running.engine.asked_of("update", lambda update: update.rtt_ms >= 200.0)
        rtts = [request.update.rtt_ms for request in running.engine.requests if request.WhichOneof("kind") == "update"]
        assert max(rtts[:2]) < 200.0
        stream.call.cancel()


async def test_a_sessions_first_round_trip_is_news_and_its_next_ones_are_not(tmp_path):
    news = []
    async with front(tmp_path, ping_interval_s=0.05, on_first_rtt=lambda: news.append("known")) as running:
        stream = await running.open()
        for _ in range(3):
            assert len(news) <= 1
            ping = (await stream.read(pings=True)).ping
            await stream.send(pong=session_pb2.Pong(nonce=ping.nonce))
            await asyncio.sleep(0.02)
        assert news == ["known"]
        stream.call.cancel()


async def test_a_pong_is_believed_once(plain):
    stream = await plain.open()
    ping = (await stream.read(pings=True)).ping
    for nonce in (ping.nonce, ping.nonce, 12345):
        await stream.send(pong=session_pb2.Pong(nonce=nonce))
    await stream.send(cancel=session_pb2.Cancel(epoch=1))
    await plain.engine.asked("cancel")
    assert sum(request.WhichOneof("kind") == "update" for request in plain.engine.requests) == 1
    stream.call.cancel()


async def test_pings_go_out_between_commits_too(plain):
    stream = await plain.open()
    kinds = []
    for position in range(40):
        plain.engine.commit("s", 1, position, [5])
        kinds.append((await stream.read(pings=True)).WhichOneof("kind"))
        await asyncio.sleep(0.005)
    assert "ping" in kinds
    stream.call.cancel()


async def test_a_device_that_answers_nothing_is_gone_in_time(tmp_path):
    async with front(tmp_path, ping_interval_s=0.05, silence_timeout_s=0.3) as running:
        stream = await running.open()
        error = await stream.refusal()
        assert isinstance(error, Unavailable)
        assert "the device has been silent for 0.3 s" in str(error)
        await running.engine.asked("stop")


@pytest.mark.parametrize("life", [session_pb2.Pong(nonce=12345), session_pb2.Pong(nonce=0)])
async def test_a_pong_to_no_ping_is_no_sign_of_life(tmp_path, life):
    async with front(tmp_path, ping_interval_s=0.05, silence_timeout_s=0.3) as running:
        stream = await running.open()
        stream.keep_sending(pong=life)
        assert isinstance(await stream.refusal(), Unavailable)


async def test_appends_are_signs_of_life(tmp_path):
    async with front(tmp_path, ping_interval_s=0.05, silence_timeout_s=0.3) as running:
        stream = await running.open()
        append = session_pb2.Append(first_id=1)
        talking = stream.keep_sending(append=append)
        await asyncio.sleep(0.8)
        assert running.tenants == {"s": "default"}
        talking.cancel()
        assert isinstance(await stream.refusal(), Unavailable)


async def test_a_device_that_reads_nothing_loses_its_place(tmp_path):
    async with front(tmp_path, ping_interval_s=0.05, silence_timeout_s=0.3) as running:
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

    headers = [
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", SESSION.encode()),
        (b":authority", b"v"),
        (b"te", b"trailers"),
        (b"content-type", b"application/grpc"),
    ]
    message = session_pb2.ClientMessage(open=opening).SerializeToString()
    return (
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
        + frame(4, 0, 0, (4).to_bytes(2) + (0).to_bytes(4))
        + frame(1, 4, 1, b"".join(header(*pair) for pair in headers))
        + frame(0, 0, 1, b"\0" + len(message).to_bytes(4) + message)
    )


# --- the engine


async def test_what_the_engine_refuses_reaches_the_device_as_it_is(plain):
    stream = await plain.open()
    plain.engine.fail("s", 1, BadRequest.bound("prompt length + max_tokens", "3 + 9", "at most 8"))
    error = await stream.refusal()
    assert type(error) is BadRequest
    assert error.field == "prompt length + max_tokens"
    assert str(error) == "prompt length + max_tokens is 3 + 9, must be at most 8"


async def test_all_streams_learn_that_the_engine_has_died(plain):
    streams = [await plain.open(f"s{i}") for i in range(3)]
    plain.engine.die()
    for stream in streams:
        error = await stream.refusal()
        assert isinstance(error, Unavailable)
        assert "engine process has ended" in str(error)
    assert plain.host.ended.is_set()
    await until(lambda: not plain.tenants)
    assert isinstance(await (await plain.open("late", wait=False)).refusal(), Unavailable)


async def test_a_defect_is_reported_by_a_number_and_not_by_its_message(tmp_path):
    async def authorise(ticket):
        raise RuntimeError("secret path /etc/keys")

    async with front(tmp_path, authorise=authorise) as running:
        error = await (await running.open(wait=False)).refusal()
    assert "secret" not in str(error)
    assert "internal error" in str(error)


async def test_a_hung_engine_is_given_up_and_its_streams_end_with_an_error(tmp_path):
    async with front(tmp_path, ping_interval_s=0.05, engine_silence_s=0.4) as running:
        reporting = asyncio.create_task(keep_reporting(running.engine))
        stream = await running.open()
        await asyncio.sleep(0.8)
        assert not running.host.ended.is_set()  # it spoke
        reporting.cancel()
        error = await stream.refusal()
        assert isinstance(error, Unavailable)
        assert "engine process has ended" in str(error)
        assert running.host.ended.is_set()


async def keep_reporting(engine, **kind) -> None:
    while True:
        engine.send(**(kind or {"stats": engine_pb2.EngineStats()}))
        await asyncio.sleep(0.05)


async def test_pings_tell_a_device_that_the_engines_process_is_silent_and_that_its_answers_were_heard(tmp_path):
    async with front(tmp_path, ping_interval_s=0.05) as running:
        stream = await running.open()
        ping = await next_ping(stream)
        assert ping.engine_quiet_ms <= 1_000 and ping.heard == 0
        await stream.send(pong=session_pb2.Pong(nonce=ping.nonce))
        await until(lambda: running.host.quiet_ms >= 1_000)  # it has sent nothing since it was ready
        while (ping := await next_ping(stream)).engine_quiet_ms < 1_000:
            pass
        assert ping.heard == 1
        running.engine.send(alive=engine_pb2.Alive(expected_s=9.0))
        while (ping := await next_ping(stream)).engine_quiet_ms >= 1_000:
            pass


async def next_ping(stream) -> session_pb2.Ping:
    while (message := await stream.read(pings=True)).WhichOneof("kind") != "ping":
        pass
    return message.ping


@pytest.mark.parametrize(("expected_s", "hangs"), [(0.02, True), (0.3, False)])
async def test_pings_tell_of_a_step_that_takes_far_longer_than_it_should(tmp_path, expected_s, hangs):
    async with front(tmp_path, ping_interval_s=0.05) as running:
        stream = await running.open()
        running.engine.commit("s", 1, 0, [5])
        alive = engine_pb2.Alive(expected_s=expected_s)
        reporting = asyncio.create_task(keep_reporting(running.engine, alive=alive))
        told = []
        for _ in range(40):
            ping = await next_ping(stream)
            await stream.send(pong=session_pb2.Pong(nonce=ping.nonce))
            told.append(ping.engine_quiet_ms)
        assert (max(told) > 1_500) is hangs and told[0] < 500
        running.engine.send(stats=engine_pb2.EngineStats())
        while (ping := await next_ping(stream)).engine_quiet_ms >= 1_000:
            pass
        reporting.cancel()


async def test_an_engine_that_only_says_that_it_runs_is_given_up_too(tmp_path):
    async with front(tmp_path, engine_silence_s=0.4) as running:
        stream = await running.open()
        reporting = asyncio.create_task(keep_reporting(running.engine, alive=engine_pb2.Alive(expected_s=1.0)))
        assert isinstance(await stream.refusal(), Unavailable)
        assert running.host.ended.is_set() and running.host.quiet_ms < 400
        reporting.cancel()


async def test_silence_is_counted_while_the_front_itself_runs(tmp_path):
    async with front(tmp_path, engine_silence_s=0.4) as running:
        time.sleep(1.0)  # noqa: ASYNC251  # as if all had been suspended: nobody speaks or listens
        running.engine.send(stats=engine_pb2.EngineStats(verifier=VerifierTelemetry(step_ms=3.0)))
        await until(lambda: running.host.stats.verifier.step_ms == 3.0)
        assert not running.host.ended.is_set()


async def test_a_frame_that_is_no_event_ends_the_engine_and_not_in_silence(plain, caplog):
    stream = await plain.open()
    plain.engine.send_bytes(b"\xff" * 9)
    assert isinstance(await stream.refusal(), Unavailable)
    assert plain.host.ended.is_set()
    assert "no event" in caplog.text


@pytest.mark.parametrize("logprobs", [False, True])
async def test_sizes_at_the_socket_do_not_tell_how_many_tokens_were_accepted(plain, logprobs):
    sizes = []

    async def relay(reader, writer):
        above, below = await asyncio.open_connection("127.0.0.1", plain.port)

        async def up():
            while data := await reader.read(65_536):
                below.write(data)

        async def down():
            while True:
                head = await above.readexactly(9)  # of a frame of HTTP/2
                body = await above.readexactly(int.from_bytes(head[:3]))
                if head[3] == 0:
                    sizes.append(len(body))
                writer.write(head + body)

        try:
            await asyncio.gather(up(), down())
        except (asyncio.IncompleteReadError, OSError):
            below.close()

    async with serving(relay) as address, channels.channel(address) as link:
        stream = Stream(session_pb2_grpc.VerifierStub(link).Session())
        attach = session_pb2.Attach(epoch=1, prompt=[1], max_tokens=400, sampling=SAMPLING)
        if logprobs:
            attach.logprobs = 2
        await stream.send(open=session_pb2.Open(session_id="s", attach=attach))
        await stream.read()
        for count in range(1, 21):
            told = {"logprob": [-1.0] * count, "top_id": [100] * 2 * count, "top_logprob": [-1.0] * 2 * count}
            commit = session_pb2.Commit(epoch=1, token=[100] * count, **(told if logprobs else {}))
            plain.engine.send("s", 1, commit=commit)
            assert len((await stream.read()).commit.token) == count
        stream.call.cancel()
    assert len(sizes) > 20
    assert len(set(sizes)) == 1
