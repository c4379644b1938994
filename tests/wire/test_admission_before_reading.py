"""Test that callers without a credential, or without end, cannot keep others out of a server or fill its memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from logged import errors_logged

from outrider.core.errors import BadRequest, Overloaded, Unauthenticated, Unavailable
from outrider.wire import admission
from outrider.wire.admission import Metadata, Shares
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
    await stub.Deregister(pb.DeregisterRequest(), metadata=(("tenant", tenant),), timeout=60.0)


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
        held, refused = {asyncio.ensure_future(call) for call in calls}, set()
        async with asyncio.timeout(60.0):
            while len(refused) < 32:
                done, held = await asyncio.wait(held, return_when=asyncio.FIRST_COMPLETED)
                refused |= done
        assert all(isinstance(error_from_rpc(one.exception()), Overloaded) for one in refused)  # type: ignore[arg-type]
        await answered(link, "bobs")
        assert len(held) == 8 and not any(one.done() for one in held)
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


async def test_a_health_check_tells_whether_the_server_takes_work() -> None:
    running, health = server(), Health()
    health.add_to(running)
    port = bind(running, "127.0.0.1:0")
    await running.start()
    async with channel(f"127.0.0.1:{port}") as link:
        for serving in (False, True):
            health.serving = serving
            request = health_pb2.HealthCheckRequest(service="outrider.wire.v1.Verifier")
            reply = await health_pb2_grpc.HealthStub(link).Check(request, timeout=60.0)
            assert (reply.status == health_pb2.HealthCheckResponse.SERVING) is serving
    await running.stop(None)
