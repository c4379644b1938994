"""Test that callers without a credential, or without end, cannot keep others out of a server or fill its memory."""

from __future__ import annotations

import asyncio
import contextlib
import resource
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from logged import errors_logged

from outrider.core.errors import BadRequest, Overloaded, Unauthenticated, Unavailable
from outrider.wire import admission, channels
from outrider.wire.admission import AdmitBeforeReading, Metadata, Shares
from outrider.wire.channels import bind, channel, server
from outrider.wire.health import Health
from outrider.wire.status import error_from_rpc
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc as stubs

DEREGISTER = "/outrider.wire.v1.Registry/Deregister"


class Registry(stubs.RegistryServicer):
    async def Deregister(self, request: pb.DeregisterRequest, context: Any) -> pb.DeregisterResponse:
        return pb.DeregisterResponse()


async def admit(method: str, metadata: Metadata) -> str | None:
    tenant = dict(metadata).get("tenant", "")
    if not tenant:
        raise Unauthenticated("no credential")
    return str(tenant)


@contextlib.asynccontextmanager
async def serving(max_rpcs: int = 64) -> AsyncIterator[str]:
    running, health = server(max_rpcs=max_rpcs, admit=admit), Health()
    stubs.add_RegistryServicer_to_server(Registry(), running)  # type: ignore[no-untyped-call]
    health.add_to(running)
    health.serving = True
    port = bind(running, "127.0.0.1:0")
    await running.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await running.stop(None)


async def answered(link: grpc.aio.Channel, tenant: str = "acme") -> None:
    stub = stubs.RegistryStub(link)  # type: ignore[no-untyped-call]
    await stub.Deregister(pb.DeregisterRequest(), metadata=(("tenant", tenant),), timeout=5.0)


async def refusal(call: Any) -> Exception:
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await call
    return error_from_rpc(ended.value)


async def test_a_caller_without_a_credential_is_refused_before_its_request_is_read() -> None:
    async with serving() as address, channel(address) as link:
        assert isinstance(await refusal(link.stream_unary(DEREGISTER)()), Unauthenticated)


async def test_a_call_whose_request_never_comes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "REQUEST_S", 0.05)
    async with serving() as address, channel(address) as link:
        assert isinstance(await refusal(link.stream_unary(DEREGISTER)(metadata=(("tenant", "acme"),))), Unavailable)


async def test_a_request_that_is_no_message_is_the_callers_fault_and_no_line_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving() as address, channel(address) as link:
        garbage = link.unary_unary(DEREGISTER)(b"\xff" * 8, metadata=(("tenant", "acme"),))
        assert isinstance(await refusal(garbage), BadRequest)
    assert errors_logged(caplog) == []


async def test_a_tenant_whose_calls_never_end_keeps_nobody_else_out() -> None:
    async with serving(max_rpcs=16) as address, channel(address) as flood, channel(address) as link:
        unfinished = flood.stream_unary(DEREGISTER)
        calls = [unfinished(metadata=(("tenant", "acme"),)) for _ in range(40)]
        done, held = await asyncio.wait([asyncio.ensure_future(call) for call in calls], timeout=0.5)
        assert len(held) == 8
        assert all(isinstance(error_from_rpc(one.exception()), Overloaded) for one in done)  # type: ignore[arg-type]
        await answered(link, "bobs")
        for call in calls:
            call.cancel()


def test_a_tenant_may_hold_as_many_as_are_free() -> None:
    calls = Shares(12, "calls at once")
    with contextlib.ExitStack() as held:
        for tenant, free in (("acme", 6), ("bobs", 3), ("cats", 2)):
            for _ in range(free):
                held.enter_context(calls.one(tenant))
            with pytest.raises(Overloaded, match=f"tenant {tenant} has {free} calls at once, as many as are free"):
                held.enter_context(calls.one(tenant))
    assert calls.held == 0


async def test_requests_of_one_tenant_are_read_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "READS", 2)
    calls, reading, most = AdmitBeforeReading(admit, 64), 0, 0

    async def slow() -> AsyncIterator[bytes]:
        nonlocal reading, most
        reading += 1
        most = max(most, reading)
        await asyncio.sleep(0.001)
        reading -= 1
        yield b""

    class Context:
        def invocation_metadata(self) -> Metadata:
            return (("tenant", "acme"),)

    async def respond(request: bytes, context: Any) -> bytes:
        return request

    async def found(_: Any) -> Any:
        return grpc.unary_unary_rpc_method_handler(respond, lambda data: data, lambda data: data)

    handler = await calls.intercept_service(found, SimpleNamespace(method=DEREGISTER))  # type: ignore[arg-type]
    await asyncio.gather(*(handler.stream_unary(slow(), Context()) for _ in range(8)))
    assert most == 2


async def test_watches_and_reflection_are_not_served_and_stop_nothing() -> None:
    async with serving() as address, channel(address) as flood, channel(address) as link:
        watch = health_pb2_grpc.HealthStub(flood).Watch
        reflect = flood.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")
        calls = [watch(health_pb2.HealthCheckRequest()) for _ in range(500)] + [reflect() for _ in range(500)]
        await answered(link)
        assert grpc.StatusCode.OK not in {await call.code() for call in calls}


async def test_health_checks_are_answered_though_their_requests_never_come() -> None:
    async with serving(max_rpcs=16) as address, channel(address) as link:
        check = link.stream_unary(
            "/grpc.health.v1.Health/Check", response_deserializer=health_pb2.HealthCheckResponse.FromString
        )
        for _ in range(40):
            assert (await check(timeout=5.0)).status == health_pb2.HealthCheckResponse.SERVING


async def test_a_health_check_tells_whether_the_server_takes_work() -> None:
    running, health = server(), Health()
    health.add_to(running)
    port = bind(running, "127.0.0.1:0")
    await running.start()
    async with channel(f"127.0.0.1:{port}") as link:
        for serving in (False, True):
            health.serving = serving
            request = health_pb2.HealthCheckRequest(service="outrider.wire.v1.Verifier")
            reply = await health_pb2_grpc.HealthStub(link).Check(request, timeout=5.0)
            assert (reply.status == health_pb2.HealthCheckResponse.SERVING) is serving
    await running.stop(None)


async def test_a_connection_without_calls_is_closed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {**dict(channels._SERVER), "grpc.max_connection_idle_ms": 100}
    monkeypatch.setattr(channels, "_SERVER", tuple(options.items()))
    async with serving() as address:
        host, port = address.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))  # and empty settings
        async with asyncio.timeout(10.0):
            while await reader.read(4_096):
                pass
        writer.close()


def test_a_server_may_have_more_connections_than_a_process_usually_has_files() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        channels._raise_open_files()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(before[1], channels.OPEN_FILES)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
