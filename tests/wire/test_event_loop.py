"""Test that the event loop takes the wake-ups of grpc.aio together, and loses no event by that."""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc

from outrider.wire import channels
from outrider.wire.event_loop import GrpcEventLoop

METHOD = "/test.Echo/Echo"


class Poller:
    """Do as grpc.aio's completion queue does: a byte wakes the loop, and a call takes one byte and all events."""

    def __init__(self) -> None:
        self.events: list[int] = []
        self.taken: list[int] = []
        self.calls = 0
        self.reads, self._writes = socket.socketpair()
        self.reads.setblocking(False)

    def push(self, *events: int) -> None:
        for event in events:
            self.events.append(event)
            self._writes.send(b"1")

    def _handle_events(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self.reads.recv(1) == b"1"
        self.calls += 1
        self.taken += self.events
        self.events.clear()

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        loop.add_reader(self.reads, functools.partial(self._handle_events, loop))


async def _turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def run(body: Any) -> Any:
    with asyncio.Runner(loop_factory=GrpcEventLoop) as runner:
        return runner.run(body)


def test_the_handler_of_grpc_runs_once_for_all_events_that_have_come():
    async def body() -> Poller:
        poller = Poller()
        poller.listen(asyncio.get_running_loop())
        poller.push(*range(100))
        await _turns()
        assert (poller.calls, poller.taken) == (1, list(range(100)))
        poller.push(100)
        await _turns()
        return poller

    poller = run(body())
    assert (poller.calls, poller.taken) == (2, list(range(101)))


def test_other_readers_get_every_byte():
    async def body() -> bytes:
        reads, writes = socket.socketpair()
        reads.setblocking(False)
        got = []
        asyncio.get_running_loop().add_reader(reads, lambda: got.append(reads.recv(1)))
        writes.send(b"abc")
        await _turns()
        return b"".join(got)

    assert run(body()) == b"abc"


def test_streams_of_grpc_get_all_their_messages():
    async def echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    async def talk(channel: grpc.aio.Channel, number: int) -> list[bytes]:
        call = channel.stream_stream(METHOD)()
        sent = [b"%d of %d" % (i, number) for i in range(20)]
        for message in sent:
            await call.write(message)
        await call.done_writing()
        assert [message async for message in call] == sent
        return sent

    async def body() -> int:
        server = channels.server()
        handlers = {"Echo": grpc.stream_stream_rpc_method_handler(echo)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Echo", handlers),))
        port = channels.bind(server, "127.0.0.1:0")
        await server.start()
        async with asyncio.timeout(30), channels.channel(f"127.0.0.1:{port}") as channel:
            talked = await asyncio.gather(*[talk(channel, number) for number in range(50)])
        await server.stop(0)
        return sum(map(len, talked))

    assert run(body()) == 1_000
