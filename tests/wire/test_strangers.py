"""Test that peers without a credential have few connections, whatever else they do, and others as many as they want."""

import asyncio
import contextlib
import math
from collections import Counter
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hypothesis import given
from hypothesis import strategies as st
from unfinished_messages import UnfinishedMessages

from outrider.core.errors import Overloaded, Unauthenticated
from outrider.wire import channels, strangers
from outrider.wire.admission import AdmitBeforeReading
from outrider.wire.health import HealthServicer
from outrider.wire.strangers import Strangers, host_of

METHOD = "/test.Test/Call"
HELD = "/test.Test/Hold"


class Serving:
    """A server of two methods whose callers are named by their metadata; who has no name is refused."""

    def __init__(self, max_rpcs: int = 64, **bounds: int) -> None:
        per_host = bounds.pop("per_host", 8)
        self.strangers = Strangers(per_host)
        self.server = channels.server(max_rpcs=max_rpcs, admit=self.admit, strangers=self.strangers, **bounds)
        build = grpc.unary_unary_rpc_method_handler
        methods = {name: build(serve, bytes, bytes) for name, serve in (("Call", call), ("Hold", hold))}
        self.server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Test", methods),))
        health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), self.server)
        self.port = channels.bind(self.server, "127.0.0.1:0")
        self.address = f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> "Serving":
        self._stack = contextlib.AsyncExitStack()
        await self._stack.enter_async_context(self.strangers.bounded(self.port))
        await self.server.start()
        self._stack.push_async_callback(self.server.stop, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def admit(self, method, metadata):
        name = dict(metadata).get("name")
        if method.startswith("/grpc.health"):
            return None
        if name is None:
            raise Unauthenticated("no name")
        return name


async def call(request: bytes, context) -> bytes:
    return request


async def hold(request: bytes, context) -> bytes:
    await asyncio.sleep(60.0)
    return request


async def still_open(
    connections: list[UnfinishedMessages], most: int, calls: int, seconds: float, path: str = METHOD
) -> int:
    """Hold connections, with as many calls each, until at most so many are open, and so many seconds more.

    Return how many the server has not closed by then. It may take a minute for the first: a busy machine is no fault.
    """
    held = [asyncio.create_task(connection.send(path, calls, 100_000, math.inf)) for connection in connections]
    left = set(held)
    try:
        async with asyncio.timeout(60.0):
            while len(left) > most:
                _, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(seconds)
        return sum(not one.done() for one in left)
    finally:
        for connection in connections:
            connection.close()
        await asyncio.gather(*held)


def flood(serving: Serving, count: int, source: str = "127.0.0.2", **fields) -> list[UnfinishedMessages]:
    return [UnfinishedMessages(serving.address, source=source, **fields) for _ in range(count)]


async def test_a_host_has_few_connections_without_a_credential_and_others_are_not_affected(monkeypatch):
    monkeypatch.setattr(strangers, "GRACE_S", 0.5)
    async with Serving() as serving, channels.channel(serving.address) as link:
        named = link.unary_unary(METHOD)(b"1", metadata=(("name", "acme"),))
        assert await named == b"1"
        few = asyncio.create_task(still_open(flood(serving, 8, "127.0.0.3"), 8, 0, 2.0))
        assert await still_open(flood(serving, 60), 8, 0, 1.0) == 8
        assert await few == 8
        assert await link.unary_unary(METHOD)(b"2", metadata=(("name", "acme"),)) == b"2"


async def test_connections_with_a_credential_are_as_many_as_their_host_wants():
    name = ((b"name", b"acme"),)
    async with Serving() as serving:
        assert await still_open(flood(serving, 30, headers=name), 30, 1, 2.0) == 30


async def test_a_health_check_is_no_credential(monkeypatch):
    monkeypatch.setattr(strangers, "GRACE_S", 0.5)
    async with Serving() as serving:
        assert await still_open(flood(serving, 30), 8, 1, 1.0, "/grpc.health.v1.Health/Check") == 8


async def test_without_a_bound_by_host_only_all_strangers_together_are_bounded(monkeypatch):
    monkeypatch.setattr(strangers, "IN_ALL", 20)
    async with Serving(per_host=0) as serving:
        assert await still_open(flood(serving, 60), 20, 0, 1.0) == 20


async def test_connections_beyond_all_bounds_are_closed_at_once():
    async with Serving(max_connections=10) as serving:
        assert await still_open(flood(serving, 30), 10, 0, 1.0) == 10


async def test_a_host_whose_calls_are_refused_too_often_loses_its_connections_and_no_other_does(monkeypatch):
    monkeypatch.setattr(strangers, "REFUSALS", 50)
    async with Serving() as serving, channels.channel(serving.address) as link:
        assert await link.unary_unary(METHOD)(b"1", metadata=(("name", "acme"),)) == b"1"
        assert await still_open(flood(serving, 4, again=True), 0, 40, 0.0) == 0
        assert await still_open(flood(serving, 4, "127.0.0.3"), 4, 10, 1.0) == 4
        with pytest.raises(grpc.aio.AioRpcError):  # one that has shown its name may forget it
            await link.unary_unary(METHOD)(b"2")
        assert await link.unary_unary(METHOD)(b"3", metadata=(("name", "acme"),)) == b"3"


@pytest.mark.parametrize("path", ["/grpc.health.v1.Health/Watch", "/test.Test/NoSuchMethod"])
async def test_refusals_of_calls_that_need_no_credential_count_as_well(monkeypatch, path):
    monkeypatch.setattr(strangers, "REFUSALS", 50)
    async with Serving() as serving, channels.channel(serving.address) as link:
        assert await link.unary_unary(METHOD)(b"1", metadata=(("name", "acme"),)) == b"1"
        assert await still_open([UnfinishedMessages(serving.address, again=True)], 0, 80, 0.0, path) == 0
        assert await link.unary_unary(METHOD)(b"2", metadata=(("name", "acme"),)) == b"2"


class Looking:
    """Strangers at a server whose connections are made up, on a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, received: dict[str, int]) -> None:
        """received: bytes that have come by connection."""
        self.now = 100.0
        self.closed: list[str] = []
        files = {peer: number for number, peer in enumerate(received)}
        monkeypatch.setattr(strangers, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(strangers, "_connections", lambda port: (files, 0.0))
        monkeypatch.setattr(strangers, "_received", lambda file: [*received.values()][file])
        monkeypatch.setattr(strangers, "_shut_down", self._shut_down)
        self.strangers = Strangers()
        self.strangers._port = 7600

    def _shut_down(self, peers, *_):
        self.closed += sorted(peers)
        return len(peers)

    def refuse(self, times: int, peer: str) -> list[str]:
        """Refuse calls of a peer; return what is closed for it."""
        self.now, self.closed = self.now + strangers.HURRIED_S, []
        for _ in range(times):
            self.strangers.refused(peer)
        return self.closed


def peers_of(host: str, count: int) -> list[str]:
    return [f"ipv4:{host}:{port}" for port in range(1, count + 1)]


def test_refused_calls_cost_their_connection_and_those_that_sent_much_without_a_credential(monkeypatch):
    first, quiet, loud, known = peers_of("10.0.0.1", 4)
    (other,) = peers_of("10.0.0.2", 1)
    much = strangers.REFUSED_BYTES + 1
    looking = Looking(monkeypatch, {first: 500, quiet: strangers.REFUSED_BYTES, loud: much, known: much, other: much})
    looking.strangers.admitted(known)
    assert looking.refuse(strangers.REFUSALS, first) == []
    assert looking.refuse(1, first) == [first, loud]
    assert looking.refuse(1, known) == []


def test_of_a_host_with_many_such_connections_all_without_a_credential_are_closed_for_a_second(monkeypatch):
    *flood, quiet, known = peers_of("10.0.0.1", strangers.FLOOD + 2)
    (other,) = peers_of("10.0.0.2", 1)
    received = dict.fromkeys(flood, strangers.REFUSED_BYTES + 1)
    looking = Looking(monkeypatch, {**received, quiet: 0, known: 0, other: 0})
    looking.strangers.admitted(known)
    assert looking.refuse(strangers.REFUSALS + 1, flood[0]) == sorted(flood)
    received.clear()
    assert looking.refuse(1, flood[0]) == sorted([*flood, quiet])
    looking.now += strangers.FLOOD_S
    for peer in flood:
        looking.strangers.admitted(peer)
    assert looking.refuse(1, "ipv4:10.0.0.1:99") == []


def test_a_connection_that_has_shown_a_credential_is_closed_if_call_after_call_is_refused(monkeypatch):
    known, other = peers_of("10.0.0.1", 2)
    looking = Looking(monkeypatch, {known: 0, other: 0})
    looking.strangers.admitted(known, "acme")
    looking.strangers.admitted(other, "acme")
    assert looking.refuse(strangers.REFUSALS + strangers.KNOWN_REFUSALS, known) == []
    assert looking.refuse(1, known) == [known]


def test_where_connections_run_out_the_tenants_that_have_most_lose_their_last_ones():
    first, second, nobody = peers_of("10.0.0.1", 50), peers_of("10.0.0.2", 20), peers_of("10.0.0.3", 10)
    bounded = Strangers(most=100)  # crowded from 76 on
    for tenant, peers in (("acme", first), ("bobs", second), ("", nobody)):
        for peer in peers:
            bounded.admitted(peer, tenant)
    assert bounded.crowding([*first, *second]) == []
    assert bounded.crowding([*first, *second, *nobody]) == first[45:]
    assert bounded.crowding([*first[:45], *second, *nobody]) == []


async def test_health_checks_beyond_a_rate_are_refused_and_then_cost_their_connection(monkeypatch):
    monkeypatch.setattr(strangers, "CHECKS", 20)
    address = (serving := Serving()).address
    async with serving, channels.channel(address) as link, channels.channel(address) as own:
        assert await own.unary_unary(METHOD)(b"1", metadata=(("name", "acme"),)) == b"1"
        check = health_pb2_grpc.HealthStub(link).Check
        ended: Counter[str] = Counter()
        while not ended["UNAVAILABLE"]:
            try:
                await check(health_pb2.HealthCheckRequest())
                ended["OK"] += 1
            except grpc.aio.AioRpcError as error:
                ended[error.code().name] += 1
        assert ended["OK"] == 20
        assert ended["RESOURCE_EXHAUSTED"] >= strangers.REFUSALS
        assert await own.unary_unary(METHOD)(b"1", metadata=(("name", "acme"),)) == b"1"


async def test_the_system_tells_what_has_come_over_a_connection():
    async with Serving() as serving, channels.channel(serving.address) as link:
        assert await link.unary_unary(METHOD)(bytes(30_000), metadata=(("name", "acme"),))
        peers, _ = strangers._connections(serving.port)
        (file,) = peers.values()
        assert 30_000 < strangers._received(file) < 32_000
    assert strangers._received(file) == 0  # by now it is none


async def test_two_tenants_together_do_not_hold_all_calls():
    async with Serving(max_rpcs=30) as serving, contextlib.AsyncExitStack() as stack:
        link = await stack.enter_async_context(channels.channel(serving.address))
        held = [
            link.unary_unary(HELD)(b"", metadata=(("name", name),)) for name in ("first", "second") for _ in range(40)
        ]
        await asyncio.sleep(0.5)
        running = sum(not one.done() for one in held)
        assert 20 <= running <= 23  # a third each, or 15 and 8 (a half, and half of the rest) where one comes first
        assert await link.unary_unary(METHOD)(b"1", metadata=(("name", "third"),)) == b"1"
        for one in held:
            one.cancel()


async def test_strangers_are_refused_in_time_while_calls_are_pending():
    async with Serving() as serving, channels.channel(serving.address) as link:
        check = health_pb2_grpc.HealthStub(link).Check
        attack = asyncio.create_task(still_open(flood(serving, 8), 8, 500, 2.0))
        await asyncio.sleep(0.5)
        answer = await check(health_pb2.HealthCheckRequest(), timeout=10.0)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        await attack


def test_a_tenant_may_have_as_many_calls_as_are_free():
    admission = AdmitBeforeReading(lambda *_: None, 12, Strangers())
    with contextlib.ExitStack() as stack:
        had = dict.fromkeys("abc", 0)
        for _ in range(12):
            for name in had:
                with contextlib.suppress(Overloaded):
                    stack.enter_context(admission._counted(name))
                    had[name] += 1
        assert had == {"a": 3, "b": 3, "c": 3}
        stack.enter_context(admission._counted("d"))


PEERS = st.sets(st.tuples(st.integers(1, 6), st.integers(1, 40)), max_size=120).map(
    lambda pairs: [f"ipv4:10.0.0.{host}:{port}" for host, port in sorted(pairs)]
)


@given(PEERS, PEERS, PEERS, st.integers(0, 10), st.integers(5, 60), st.sampled_from([1.0, 3.0]))
def test_what_is_left_open_keeps_every_bound_and_nothing_is_closed_without_need(
    first, second, known, per_host, in_all, later
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strangers, "IN_ALL", in_all)
        bounded = Strangers(per_host)
        left = set(first) - set(bounded.to_close(first, 0.0))
        for peer in known:
            bounded.admitted(peer)
        peers = [*left, *(peer for peer in second if peer not in left)]
        closed = bounded.to_close(peers, later)
        unknown = [peer for peer in peers if peer not in known]
        kept = [peer for peer in unknown if peer not in closed]
        assert set(closed) <= set(unknown)
        assert len(closed) == len(set(closed))
        assert len(kept) <= in_all
        count = {host: sum(host_of(peer) == host for peer in kept) for host in map(host_of, unknown)}
        for host, kept_of_host in count.items():
            had = sum(host_of(peer) == host for peer in unknown)
            late = sum(host_of(peer) == host and peer in left for peer in kept) if later > strangers.GRACE_S else 0
            assert not per_host or late <= per_host
            least = in_all // max(1, len(count))
            assert kept_of_host >= min(had, least, per_host or had)
