"""Test what further front processes and the verifier's own one tell each other, and the engine's ends of sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_engine import TARGET

from cloud_verifier.config import VerifierConfig
from cloud_verifier.engine_process import ipc
from cloud_verifier.engine_process.ipc import EngineEnd
from cloud_verifier.front.control import GONE, ControlLink
from cloud_verifier.front.counters import FrontCounters, StreamCounters
from cloud_verifier.front.further import FurtherFronts, engine_listener
from cloud_verifier.front.further_process import SharedSessions
from cloud_verifier.front.live_sessions import LiveSessions
from cloud_verifier.traffic.recorder import RecordedSession
from outrider.core.errors import (
    BadRequest,
    Draining,
    Fenced,
    InternalError,
    OutriderError,
    Overloaded,
    Unauthenticated,
    Unavailable,
)
from outrider.core.protocol.messages import Directive, SessionLimits
from outrider.wire.ticket import Claims
from outrider.wire.v1 import engine_pb2 as pb
from outrider.wire.v1 import session_pb2


class Engine:
    """Hold the engine's end of the sockets of several fronts."""

    def __init__(self, first: socket.socket, listener: socket.socket, path: Path) -> None:
        self.end = EngineEnd(first, listener)
        self._path = path

    def connect(self) -> Front:
        """Connect a further front."""
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(str(self._path))
        self.taken()
        return Front(sock)

    def taken(self) -> list[tuple[str, int, str | None]]:
        """Return the requests that have come: session, epoch and kind."""
        found = []
        for _ in range(3):  # a connection, its end and a request are taken one after another
            found += list(self.end.receive(lambda: 0.02))
        return [(one.session_id, one.epoch, one.WhichOneof("kind")) for one in found]


class Front:
    """Hold a front's end of its socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._buffer = bytearray()

    def send(self, session_id: str, epoch: int, **kind: Any) -> None:
        self.sock.sendall(ipc.frame(pb.EngineRequest(session_id=session_id, epoch=epoch, **kind)))

    def events(self) -> list[pb.EngineEvent]:
        """Return the events that have come."""
        self.sock.settimeout(0.05)
        with contextlib.suppress(TimeoutError):
            while data := self.sock.recv(1 << 16):
                self._buffer += data
        return [pb.EngineEvent.FromString(body) for body in ipc._bodies(self._buffer)]

    def kinds(self) -> list[tuple[str, str | None]]:
        return [(event.session_id, event.WhichOneof("kind")) for event in self.events()]


@pytest.fixture
def engine() -> Iterator[tuple[Engine, Front]]:
    """Return an engine's end and its first front."""
    ours, theirs = socket.socketpair()
    with ours, theirs, engine_listener() as (listener, path):
        yield Engine(theirs, listener, path), Front(ours)


def commit(session_id: str, epoch: int) -> pb.EngineEvent:
    return pb.EngineEvent(session_id=session_id, epoch=epoch, commit=session_pb2.Commit(epoch=epoch))


START: dict[str, Any] = {"start": pb.Start()}
STOP: dict[str, Any] = {"stop": pb.Stop()}


def test_each_front_gets_the_events_of_its_sessions_and_what_all_need(engine):
    engine, first = engine
    engine.end.send([pb.EngineEvent(ready=pb.EngineReady(vocabulary_size=7))])
    second, third = engine.connect(), engine.connect()
    assert [event.ready.vocabulary_size for event in second.events()] == [7]
    for front, name in ((first, "a"), (second, "b"), (third, "c")):
        front.send(name, 1, **START)
    assert sorted(engine.taken()) == [("a", 1, "start"), ("b", 1, "start"), ("c", 1, "start")]
    stats = pb.EngineStats()
    stats.verifier.step_ms = 20.0
    stats.sessions.add().session_id = "b"
    engine.end.send([commit("a", 1), commit("b", 1), commit("c", 1), pb.EngineEvent(stats=stats)])
    assert first.kinds() == [("", "ready"), ("a", "commit"), ("", "stats")]
    got = second.events()
    assert [event.session_id for event in got] == ["b", ""]
    assert (got[1].stats.verifier.step_ms, len(got[1].stats.sessions)) == (20.0, 0)
    assert third.kinds() == [("", "ready"), ("c", "commit"), ("", "stats")]


def test_a_later_epoch_at_another_front_fences_the_live_one_and_an_earlier_one_is_refused(engine):
    engine, first = engine
    second = engine.connect()
    second.send("s", 5, **START)
    assert engine.taken() == [("s", 5, "start")]
    for epoch in (4, 5):
        first.send("s", epoch, **START)
        assert engine.taken() == []
        (refused,) = first.events()
        assert (refused.epoch, refused.failure.kind) == (epoch, "Fenced")
        first.send("s", epoch, **STOP)  # as for every stream that ends
        assert engine.taken() == ([] if epoch == 5 else [("s", 4, "stop")])  # the engine ignores what is of no epoch
    first.send("s", 6, **START)
    assert engine.taken() == [("s", 6, "start")]
    (taken,) = second.events()
    assert (taken.epoch, taken.failure.kind) == (5, "Fenced")
    second.send("s", 5, **STOP)
    assert engine.taken() == [("s", 5, "stop")]  # which the engine ignores, as it has epoch 6
    engine.end.send([commit("s", 6)])
    assert first.kinds() == [("s", "commit")]


def test_a_place_that_a_front_frees_is_free_before_another_ones_request(engine):
    engine, first = engine
    second = engine.connect()
    second.send("a", 1, **START)
    engine.taken()
    first.send("b", 1, **START)
    second.send("c", 1, **START)
    second.send("c", 1, **STOP)
    second.send("a", 1, **STOP)
    wanted = [("a", 1, "stop"), ("b", 1, "start"), ("c", 1, "start"), ("c", 1, "stop")]
    assert engine.taken() == wanted


def test_the_sessions_of_a_front_that_has_gone_are_stopped_and_no_other(engine):
    engine, first = engine
    second = engine.connect()
    first.send("a", 1, **START)
    second.send("b", 2, **START)
    second.send("c", 3, **START)
    second.send("c", 3, **STOP)
    assert len(engine.taken()) == 4
    second.sock.close()
    assert engine.taken() == [("b", 2, "stop")]
    engine.end.send([commit("a", 1), commit("b", 2)])
    assert ("a", "commit") in first.kinds()
    assert not engine.end.closed
    first.sock.close()
    engine.taken()
    assert engine.end.closed


def test_a_further_front_that_takes_nothing_is_cut_off(engine, monkeypatch):
    monkeypatch.setattr(ipc, "STALLED_S", 0.2)
    engine, first = engine
    second = engine.connect()
    second.send("b", 1, **START)
    first.send("a", 1, **START)
    engine.taken()
    large = pb.EngineEvent(session_id="b", epoch=1, recorded=pb.RecordedTokens(top_ids=bytes(4_000_000)))
    began = time.monotonic()
    engine.end.send([large, commit("a", 1)])
    assert time.monotonic() - began < 3.0
    assert first.kinds() == [("a", "commit")]
    assert engine.taken() == [("b", 1, "stop")]


class Recorder:
    """Keep what is recorded."""

    def __init__(self) -> None:
        self.begun: list[tuple[RecordedSession, int]] = []
        self.ended: list[tuple[str, int]] = []

    def begin(self, session: RecordedSession, epoch: int) -> None:
        self.begun.append((session, epoch))

    def end(self, session_id: str, epoch: int) -> None:
        self.ended.append((session_id, epoch))


class Verifier:
    """Hold the verifier's own end of a link to one further front, and that front's end."""

    def __init__(self) -> None:
        self.config = VerifierConfig(model=Path("m"), max_sessions=3, front_processes=2)
        self.recorder = Recorder()
        self.live = LiveSessions(self.config, self.recorder)  # type: ignore[arg-type]
        self.counters = FrontCounters()
        self.hurried = 0
        self.told: list[tuple[str, dict[str, Any]]] = []
        fronts = FurtherFronts(
            self.config,
            live=self.live,
            counters=self.counters,
            authorise=self.authorise,
            hurry=self.hurry,
            options={},
        )
        self.own = fronts._link(asyncio.get_running_loop().create_future())
        names = ("directive", "announce", "fail", "drain")
        self.link = ControlLink({name: self._note(name) for name in names})
        self.shared = SharedSessions(self.config, self.link)

    async def __aenter__(self) -> Verifier:
        ours, theirs = socket.socketpair()
        self._running = [asyncio.create_task(self.own.run(ours)), asyncio.create_task(self.link.run(theirs))]
        await asyncio.sleep(0.05)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.wait(self._running)

    def hurry(self) -> None:
        self.hurried += 1

    async def authorise(self, ticket: bytes) -> Claims | None:
        if ticket == b"bad":
            raise Unauthenticated("the ticket is bad")
        return claims("s", max_streams=2)

    def _note(self, name: str) -> Any:
        return lambda **arguments: self.told.append((name, arguments))


def claims(session_id: str, **fields: Any) -> Claims:
    return Claims(
        session_id=session_id,
        tenant="acme",
        audience="v",
        epoch_first=1,
        epoch_last=9,
        expires_unix=1e12,
        limits=SessionLimits(),
        target=TARGET,
        **fields,
    )


async def told(verifier: Verifier) -> list[tuple[str, dict[str, Any]]]:
    await asyncio.sleep(0.05)
    return verifier.told


async def test_places_of_further_fronts_are_the_verifiers() -> None:
    async with Verifier() as verifier:
        for name in "abc":
            await verifier.shared.take(claims(name), 2, None)
        with pytest.raises(Overloaded, match="all 3 sessions"):
            await verifier.shared.take(claims("d"), 1, None)
        with pytest.raises(Fenced, match="must be greater than 2"):
            await verifier.shared.take(claims("a"), 2, None)
        await verifier.shared.take(claims("a"), 3, None)  # a later epoch takes over its place
        verifier.shared.left("a", 2)
        await told(verifier)
        assert sorted(verifier.live.streams) == ["a", "b", "c"]
        verifier.shared.left("a", 3)
        verifier.shared.left("b", 2)
        await verifier.shared.take(claims("d", max_streams=2), 1, None)
        with pytest.raises(Overloaded, match="all the 2 streams"):
            await verifier.shared.take(claims("e", max_streams=2), 1, None)
        verifier.live.draining = True
        with pytest.raises(Draining):
            await verifier.shared.take(claims("f"), 1, None)


async def test_a_later_epoch_in_another_process_keeps_its_place_when_the_earlier_stream_ends() -> None:
    class Earlier:
        session_id, epoch, claims, rtt_ms = "a", 2, claims("a"), 0.0

        def announce(self, serial: int) -> None:
            """Have no device to tell."""

        def close(self) -> None:
            """Hold nothing in an engine."""

    async with Verifier() as verifier:
        earlier: Any = Earlier()
        await verifier.live.take(earlier.claims, 2, None)
        verifier.live.begun(earlier)
        await verifier.shared.take(claims("a"), 3, None)
        verifier.live.release(earlier)
        assert verifier.live.streams["a"].epoch == 3
        verifier.shared.left("a", 3)
        await told(verifier)
        assert not verifier.live.streams


async def test_what_comes_before_an_admitted_stream_has_begun_is_done_then() -> None:
    async with Verifier() as verifier:
        seen: list[str] = []
        await verifier.shared.take(claims("a"), 2, None)
        verifier.shared.on_stream("a", 2, lambda stream: seen.append(stream.session_id))
        verifier.shared.on_stream("a", 1, lambda stream: seen.append("another epoch"))
        assert seen == []

        class Begun:
            session_id, epoch = "a", 2

            def announce(self, serial: int) -> None:
                """Have no device to tell."""

        begun: Any = Begun()
        verifier.shared.begun(begun)
        assert seen == ["a"]


async def test_a_front_records_only_where_the_verifier_does() -> None:
    async with Verifier() as verifier:
        assert not verifier.shared.records
        logging = verifier.config.model_copy(update={"traffic": "/somewhere"})
        assert SharedSessions(logging, verifier.link).records


async def test_a_place_that_nobody_waits_for_any_more_is_free() -> None:
    async with Verifier() as verifier:
        taking = asyncio.create_task(verifier.shared.take(claims("a"), 1, None))
        await asyncio.sleep(0)
        taking.cancel()
        await asyncio.wait({taking})
        await told(verifier)
        assert not verifier.live.streams


async def test_what_is_recorded_begins_before_the_session_and_ends_with_it() -> None:
    async with Verifier() as verifier:
        recorded = RecordedSession("a", "acme", "chat", "w", 0.5, 60.0, np.array([4, 5], np.int32))
        await verifier.shared.take(claims("a"), 2, recorded)
        ((begun, epoch),) = verifier.recorder.begun
        assert (begun, epoch, begun.prompt.tolist()) == (recorded, 2, [4, 5])
        verifier.shared.left("a", 2)
        await told(verifier)
        assert ("a", 2) in verifier.recorder.ended


async def test_directives_failures_and_releases_reach_the_front_of_a_session() -> None:
    async with Verifier() as verifier:
        verifier.live.announce(7)
        await verifier.shared.take(claims("a"), 2, None)
        verifier.live.set_directive("a", 2, Directive(4, 3, 2, 0.25, 1))
        verifier.live.hand_over()
        names = [name for name, _ in await told(verifier)]
        assert names == ["announce", "directive", "fail"]
        assert verifier.told[0][1] == {"serial": 7}
        directive = session_pb2.Directive.FromString(bytes.fromhex(verifier.told[1][1]["directive"]))
        assert directive.window_depth == Directive(4, 3, 2, 0.25, 1).window_depth
        assert verifier.told[2][1]["failure"]["kind"] == "Draining"


async def test_round_trips_and_counts_of_a_front_reach_the_verifier() -> None:
    async with Verifier() as verifier:
        await verifier.shared.take(claims("a"), 2, None)
        counters = FrontCounters()
        stream = StreamCounters(counters, "acme")
        stream.append(1, 3)
        stream.commit(session_pb2.Commit(token=[1, 2], seen=3))
        stream.round_trip(40.0)
        counters.ended["eos"] += 1
        for _ in range(2):
            verifier.link.tell("tell", rtt_ms={"a": 40.0, "gone": 1.0}, counts=counters.take())
        await told(verifier)
        total = verifier.counters
        assert (total.nodes, total.appends, total.ended["eos"], total.tenant_tokens) == (3, 1, 1, {"acme": 2})
        assert (total.rtt_s.total, total.append_commit_s.total, counters.nodes) == (1, 1, 0)
        assert verifier.live.streams["a"].rtt_ms == 40.0
        assert verifier.hurried == 1


async def test_tickets_are_verified_by_the_verifiers_process() -> None:
    async with Verifier() as verifier:
        assert await verifier.link.ask("authorise", ticket=b"good".hex())
        with pytest.raises(Unauthenticated, match="the ticket is bad"):
            await verifier.link.ask("authorise", ticket=b"bad".hex())


async def test_errors_keep_their_class_and_defects_are_told_as_such(caplog) -> None:
    def refuse() -> None:
        raise BadRequest("that cannot be", field="that")

    ours, theirs = socket.socketpair()
    one, other = ControlLink({}), ControlLink({"refuse": refuse, "fail": lambda: 1 / 0, "wait": asyncio.Event().wait})
    running = [asyncio.create_task(one.run(ours)), asyncio.create_task(other.run(theirs))]
    with pytest.raises(Unavailable, match=GONE):
        await one.ask("refuse")  # before it runs
    await asyncio.sleep(0.05)
    with pytest.raises(BadRequest, match="that cannot be") as caught:
        await one.ask("refuse")
    assert caught.value.field == "that"
    with pytest.raises(InternalError, match="ZeroDivisionError"):
        await one.ask("fail")
    assert "a message between processes of this verifier failed" in caplog.text
    waiting = asyncio.create_task(one.ask("wait"))
    await asyncio.sleep(0.05)
    running[1].cancel()
    with pytest.raises(OutriderError, match=GONE):
        await asyncio.wait_for(waiting, 5.0)
    await asyncio.wait(running)
