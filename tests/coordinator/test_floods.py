"""Test that connections without credentials cannot stop a coordinator from answering those with them."""

import asyncio
import subprocess
import sys

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from logged import errors_logged
from peers import until
from unfinished_messages import UnfinishedMessages

from outrider.core.errors import BadRequest, Overloaded, Unauthenticated, Unavailable
from outrider.wire import admission, channels
from outrider.wire.status import error_from_rpc
from outrider.wire.v1 import coordinator_pb2 as pb

OPEN = "/outrider.wire.v1.Coordinator/OpenSession"


async def test_watchers_and_reflection_of_one_connection_stop_nothing(start):
    coordinator = await start(max_rpcs=64)
    await coordinator.join("v1")
    async with channels.channel(coordinator.address) as flood:
        watch = health_pb2_grpc.HealthStub(flood).Watch
        reflect = reflection_pb2_grpc.ServerReflectionStub(flood).ServerReflectionInfo
        calls = [watch(health_pb2.HealthCheckRequest()) for _ in range(600)]
        calls += [reflect(iter([reflection_pb2.ServerReflectionRequest(list_services="")])) for _ in range(600)]
        await asyncio.sleep(1.0)
        assert (await coordinator.status()).verifiers
        assert (await coordinator.report("v1")).known
        assert (await coordinator.open()).session_id
        for call in calls:
            call.cancel()


async def test_a_flood_of_streams_over_one_connection_waits_at_its_client(start):
    coordinator = await start(max_rpcs=600)
    async with channels.channel(coordinator.address) as flood:
        unfinished = flood.stream_unary(OPEN)
        calls = [unfinished() for _ in range(1_000)]
        await asyncio.sleep(1.0)
        assert (await coordinator.status()).uptime_s > 0
        for call in calls:
            call.cancel()


async def test_calls_whose_request_never_comes_end(start, monkeypatch):
    monkeypatch.setattr(admission, "REQUEST_S", 0.3)
    coordinator = await start()
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await coordinator.channel.stream_unary(OPEN)()
    assert isinstance(error_from_rpc(ended.value), Unavailable)


async def test_a_stranger_is_refused_before_its_request_is_read(start):
    coordinator = await start(
        join_token="join-token-0123456789",
        admin_token="admin-token-0123456789",
        tenant_keys={"acme": "acme-key-0123456789"},
    )
    for method in ("Coordinator/OpenSession", "Registry/Report", "Admin/Status"):
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await coordinator.channel.stream_unary(f"/outrider.wire.v1.{method}")()  # no request ever comes
        assert isinstance(error_from_rpc(ended.value), Unauthenticated)


async def test_a_tenant_whose_calls_never_end_keeps_nobody_else_out(start, refused):
    keys = {name: f"{name}-key-0123456789" for name in ("acme", "bobs")}
    coordinator = await start(max_rpcs=64, tenant_keys=keys)
    await coordinator.join("v1")
    acme, bobs = ((("authorization", f"Bearer {keys[name]}"),) for name in ("acme", "bobs"))
    async with channels.channel(coordinator.address) as flood:
        unfinished = flood.stream_unary(OPEN)
        calls = [unfinished(metadata=acme) for _ in range(200)]
        await asyncio.sleep(1.0)
        assert (await coordinator.report("v1")).known
        assert (await coordinator.sessions.OpenSession(pb.OpenSessionRequest(), metadata=bobs)).session_id
        error = await refused(coordinator.sessions.OpenSession(pb.OpenSessionRequest(), metadata=acme))
        assert isinstance(error, Overloaded)
        assert "tenant acme has 32 calls at once" in str(error)
        for call in calls:
            call.cancel()
    await until(lambda: opened(coordinator, acme))


async def opened(coordinator, metadata) -> bool:
    try:
        return bool(await coordinator.sessions.OpenSession(pb.OpenSessionRequest(), metadata=metadata))
    except grpc.aio.AioRpcError:
        return False


async def test_health_checks_whose_requests_never_come_take_no_place_and_are_still_answered(start):
    coordinator = await start(max_rpcs=64)
    await coordinator.join("v1")
    async with channels.channel(coordinator.address) as flood:
        unfinished = flood.stream_unary("/grpc.health.v1.Health/Check")
        calls = [unfinished() for _ in range(400)]
        await asyncio.sleep(1.0)
        assert (await coordinator.report("v1")).known
        assert (await coordinator.open()).session_id
        check = health_pb2_grpc.HealthStub(coordinator.channel).Check
        answer = await check(health_pb2.HealthCheckRequest(service="outrider.wire.v1.Coordinator"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        for call in calls:
            call.cancel()


@pytest.mark.parametrize("method", ["Check", "Watch"])
async def test_long_health_checks_of_strangers_are_not_kept(start, method):
    coordinator = await start()
    flood = UnfinishedMessages(coordinator.address)
    await flood.send(f"/grpc.health.v1.Health/{method}", calls=100, message_bytes=4_000_000, seconds=3.0)
    flood.close()
    assert flood.sent < 64e6


async def test_many_connections_without_a_credential_hold_little_and_keep_nobody_out(start):
    coordinator = await start(tenant_keys={"acme": "acme-key-0123456789"})
    await coordinator.join("v1")
    floods = [UnfinishedMessages(coordinator.address, source="127.0.0.2") for _ in range(40)]
    sends = (flood.send(OPEN, calls=100, message_bytes=4_000_000, seconds=3.0) for flood in floods)
    sending = asyncio.gather(*sends)
    await asyncio.sleep(1.0)
    await until(lambda: opened(coordinator, (("authorization", "Bearer acme-key-0123456789"),)))
    await sending
    for flood in floods:
        flood.close()
    assert sum(flood.sent for flood in floods) < 40e6


async def test_two_tenants_together_leave_calls_for_a_third(start):
    keys = {name: f"{name}-key-0123456789" for name in ("acme", "bobs", "cats")}
    coordinator = await start(max_rpcs=60, tenant_keys=keys)
    await coordinator.join("v1")
    acme, bobs, cats = ((("authorization", f"Bearer {key}"),) for key in keys.values())
    async with channels.channel(coordinator.address) as flood:
        unfinished = flood.stream_unary(OPEN)
        calls = [unfinished(metadata=metadata) for _ in range(80) for metadata in (acme, bobs)]
        await asyncio.sleep(1.0)
        assert (await coordinator.sessions.OpenSession(pb.OpenSessionRequest(), metadata=cats)).session_id
        assert sum(not call.done() for call in calls) <= 45  # a half and half of the rest, at worst
        for call in calls:
            call.cancel()


async def test_long_requests_of_a_tenant_are_read_a_few_at_a_time(start):
    coordinator = await start(tenant_keys={"acme": "acme-key-0123456789"})
    flood = UnfinishedMessages(coordinator.address, headers=((b"authorization", b"Bearer acme-key-0123456789"),))
    await flood.send(OPEN, calls=100, message_bytes=4_000_000, seconds=3.0)
    flood.close()
    assert flood.sent < 1.2 * admission.READS * 4_000_000


async def test_a_request_that_is_no_message_is_the_callers_fault_and_no_line_in_the_log(start, caplog):
    coordinator = await start()
    for method in ("/grpc.health.v1.Health/Check", OPEN):
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await coordinator.channel.unary_unary(method)(b"\xff" * 8)
        assert isinstance(error_from_rpc(ended.value), BadRequest)
    assert errors_logged(caplog) == []


async def test_reflection_has_few_callers_at_once_and_they_end(start, monkeypatch):
    monkeypatch.setattr(admission, "REFLECTION_S", 2.0)
    coordinator = await start(reflection=True)
    reflect = reflection_pb2_grpc.ServerReflectionStub(coordinator.channel).ServerReflectionInfo

    async def ask():
        yield reflection_pb2.ServerReflectionRequest(list_services="")
        await asyncio.sleep(60.0)

    held = [reflect(ask()) for _ in range(channels.PUBLIC_REQUESTS)]
    for call in held:
        assert (await call.read()).list_services_response.service
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await reflect(ask()).read()
    assert isinstance(error_from_rpc(refused.value), Overloaded)
    assert {await call.code() for call in held} == {grpc.StatusCode.INVALID_ARGUMENT}
    assert (await reflect(ask()).read()).list_services_response.service


async def test_a_connection_without_calls_is_closed_after_a_while(start, monkeypatch):
    options = {**dict(channels._SERVER), "grpc.max_connection_idle_ms": 500}
    monkeypatch.setattr(channels, "_SERVER", tuple(options.items()))
    idle = UnfinishedMessages((await start()).address)
    async with asyncio.timeout(30.0):
        await idle.send("/", calls=0, message_bytes=0, seconds=60.0)


def test_a_server_may_have_more_connections_than_a_process_usually_has_files():
    code = (
        "import asyncio, resource; from outrider.wire import channels\n"
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))\n"
        "async def main(): channels.server()\n"
        "asyncio.run(main())\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, channels.OPEN_FILES))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.stdout == "True\n", ran.stderr
