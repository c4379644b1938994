"""Opening a session at a coordinator that is away, or has just come back."""

import time

import grpc
import pytest

from edge_agent.placement import Coordinator
from outrider.core.errors import Unavailable
from outrider.wire import channels
from outrider.wire.v1 import coordinator_pb2 as pb
from outrider.wire.v1 import coordinator_pb2_grpc


class Opens(coordinator_pb2_grpc.CoordinatorServicer):
    async def OpenSession(self, request: pb.OpenSessionRequest, context: grpc.aio.ServicerContext):
        return pb.OpenSessionResponse(session_id="s", primary=pb.Grant(verifier_id="v", address="127.0.0.1:1"))


async def serving(address: str) -> tuple[grpc.aio.Server, int]:
    server = channels.server()
    coordinator_pb2_grpc.add_CoordinatorServicer_to_server(Opens(), server)
    port = channels.bind(server, address)
    await server.start()
    return server, port


async def test_a_coordinator_that_has_come_back_is_found_although_its_channel_failed_before():
    server, port = await serving("127.0.0.1:0")
    async with channels.channel(f"127.0.0.1:{port}") as channel:
        coordinator = Coordinator(channel, None)
        assert (await coordinator.open("")).grants.session_id == "s"
        await server.stop(0)
        with pytest.raises(Unavailable):
            await coordinator.open("")  # the channel has failed, and backs off
        server, _ = await serving(f"127.0.0.1:{port}")
        assert (await coordinator.open("")).grants.session_id == "s"
        await server.stop(0)


async def test_a_coordinator_that_stays_away_is_said_to_be_unreachable():
    server, port = await serving("127.0.0.1:0")
    await server.stop(0)
    async with channels.channel(f"127.0.0.1:{port}") as channel:
        begun = time.monotonic()
        with pytest.raises(Unavailable, match="connect"):
            await Coordinator(channel, None).open("")
        assert time.monotonic() - begun < 10
