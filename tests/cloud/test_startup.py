"""Test the progress that an operator reads while a target loads."""

from __future__ import annotations

import logging

import grpc
import pytest

from cloud_verifier.front.startup import PROGRESS_EVERY_S, StartupService
from outrider.core.errors import Unavailable
from outrider.wire import channels
from outrider.wire.status import error_from_rpc
from outrider.wire.v1 import session_pb2, session_pb2_grpc


def test_phases_are_logged_at_once_and_shares_at_a_bounded_rate(caplog):
    now = 0.0
    startup = StartupService(clock=lambda: now)
    with caplog.at_level(logging.INFO):
        startup.progress("hashing weights: 10 MB")
        for share in range(100):
            now += PROGRESS_EVERY_S / 50
            startup.progress(f"hashing weights: {share} %")
        startup.progress("loading t as float32 on cpu")
    lines = [record.message for record in caplog.records]
    assert lines[0] == "hashing weights: 10 MB"
    assert lines[-1] == startup.phase == "loading t as float32 on cpu"
    assert 3 <= len(lines) <= 4


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
