"""Test that the device's end of a stream checks what it receives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from edge_agent.session.statistics import Statistics
from edge_agent.session.stream import VerifierStream
from outrider.core.errors import Draining
from outrider.core.protocol.messages import Append
from outrider.wire.channels import bind, channel, server
from outrider.wire.status import abort
from outrider.wire.v1 import session_pb2_grpc

STREAMS = 50


class Leaving(session_pb2_grpc.VerifierServicer):
    """Read for a moment, then drain."""

    async def Session(self, requests: AsyncIterator[Any], context: Any) -> None:
        reading = asyncio.create_task(self._read(requests))
        await asyncio.sleep(0.02)
        try:
            await abort(context, Draining("the verifier drains"))
        finally:
            await asyncio.wait({reading})

    async def _read(self, requests: AsyncIterator[Any]) -> None:
        with contextlib.suppress(grpc.aio.AbortError):
            async for _ in requests:
                pass


async def test_a_stream_that_ends_while_it_is_written_to_says_why() -> None:
    """grpc.aio replaces the status by an INTERNAL of its own if a write fails after the end."""
    leaving = server()
    session_pb2_grpc.add_VerifierServicer_to_server(Leaving(), leaving)
    port = bind(leaving, "127.0.0.1:0")
    await leaving.start()
    async with channel(f"127.0.0.1:{port}") as link:
        for _ in range(STREAMS):
            async with VerifierStream(link, 5.0, Statistics()) as stream:
                talking = asyncio.create_task(talk(stream))
                with pytest.raises(Draining, match="the verifier drains"):
                    await stream.receive()
                assert not talking.done()
                talking.cancel()
    await leaving.stop(None)


async def talk(stream: VerifierStream) -> None:
    while True:
        stream.append(Append(epoch=1, base=0, first_id=1))
        await asyncio.sleep(0.001)
