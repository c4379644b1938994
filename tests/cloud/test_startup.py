"""Test the progress that an operator reads while a target loads."""

from __future__ import annotations

import grpc
import pytest

from cloud_verifier.front.startup import StartupService
from outrider.core.errors import Unavailable
from outrider.wire import channels
from outrider.wire.status import error_from_rpc
from outrider.wire.v1 import session_pb2, session_pb2_grpc


async def test_while_the_target_loads_every_call_is_refused_with_how_far_it_is() -> None:
    startup, running = StartupService(), channels.server()
    startup.progress("loading t")
    session_pb2_grpc.add_VerifierServicer_to_server(startup, running)  # type: ignore[no-untyped-call]
    port = channels.bind(running, "127.0.0.1:0")
    await running.start()
    async with channels.channel(f"127.0.0.1:{port}") as link:
        stub = session_pb2_grpc.VerifierStub(link)  # type: ignore[no-untyped-call]
        fetched = stub.FetchArtifact(session_pb2.FetchArtifactRequest())
        for call in (stub.Describe(session_pb2.DescribeRequest()), fetched.read(), stub.Session().read()):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call
            error = error_from_rpc(refused.value)
            assert isinstance(error, Unavailable)
            assert "still loading: loading t" in str(error)
    await running.stop(None)
