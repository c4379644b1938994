"""Test that health checks answer, and that those who watch hold up nothing."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.core.errors import Overloaded
from outrider.wire import channels, health
from outrider.wire.health import HealthServicer
from outrider.wire.status import error_from_rpc
from outrider.wire.strangers import host_of

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
REQUEST = health_pb2.HealthCheckRequest()


@contextlib.asynccontextmanager
async def serving(max_rpcs: int = 8) -> AsyncIterator[tuple[HealthServicer, health_pb2_grpc.HealthStub]]:
    servicer, server = HealthServicer(), channels.server(max_rpcs=max_rpcs)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = channels.bind(server, "127.0.0.1:0")
    await server.start()
    async with channels.channel(f"127.0.0.1:{port}") as channel:
        yield servicer, health_pb2_grpc.HealthStub(channel)
    await server.stop(None)


async def status_of(call: grpc.aio.UnaryStreamCall) -> int:
    return (await asyncio.wait_for(call.read(), 5)).status


async def test_a_watcher_is_told_the_status_and_each_change() -> None:
    async with serving() as (servicer, stub):
        one, two = stub.Watch(REQUEST), stub.Watch(REQUEST)
        assert [await status_of(call) for call in (one, two)] == [SERVING, SERVING]
        one.cancel()
        await servicer.set("", NOT_SERVING)
        assert await status_of(two) == NOT_SERVING
        assert (await stub.Check(REQUEST)).status == NOT_SERVING


async def test_too_many_watchers_of_one_host_are_refused_and_take_no_place_of_work() -> None:
    async with serving(max_rpcs=4) as (servicer, stub):
        watching = [stub.Watch(REQUEST) for _ in range(health.WATCHERS_OF_HOST)]
        for call in watching:
            await status_of(call)
        for _ in range(3):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await status_of(stub.Watch(REQUEST))
            error = error_from_rpc(refused.value)
            assert isinstance(error, Overloaded)
            assert "call Check instead" in str(error)
        assert (await stub.Check(REQUEST)).status == SERVING
        watching.pop().cancel()
        async with asyncio.timeout(5):
            while servicer._watchers.total() >= health.WATCHERS_OF_HOST:  # noqa: ASYNC110  # it signals nothing
                await asyncio.sleep(0.01)
        await status_of(stub.Watch(REQUEST))


async def test_no_more_watch_than_all_hosts_together_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "WATCHERS", 2)
    async with serving() as (_, stub):
        for _ in range(2):
            await status_of(stub.Watch(REQUEST))
        with pytest.raises(grpc.aio.AioRpcError, match="in all"):
            await status_of(stub.Watch(REQUEST))


async def test_a_watch_ends_after_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "WATCH_S", 0.2)
    monkeypatch.setattr(health, "POLL_S", 0.05)
    async with serving() as (servicer, stub):
        assert [message.status async for message in stub.Watch(REQUEST)] == [SERVING]
        assert not servicer._watchers


@pytest.mark.parametrize(
    ("peer", "host"),
    [
        ("ipv4:10.0.0.1:7700", "10.0.0.1"),
        ("ipv6:[::1]:50000", "::/64"),
        ("ipv6:%5B::1%5D:50000", "::/64"),
        ("ipv6:%5B2001:db8::7%5D:1", "2001:db8::/64"),
        ("ipv6:[fe80::1%25eth0]:1", "fe80::/64"),
        ("unix:", "unix:"),
        ("unix:/run/x", "unix:/run/x"),
    ],
)
def test_calls_over_different_connections_are_of_one_host(peer: str, host: str) -> None:
    assert host_of(peer) == host
