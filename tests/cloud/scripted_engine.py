"""Script an engine that sends what a test orders, at the other end of a real EngineHost, and the front around both."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
from session_messages import attach

from cloud_verifier.config import VerifierConfig
from cloud_verifier.engine_process import ipc
from cloud_verifier.engine_process.host import EngineHost
from cloud_verifier.front import session_stream
from cloud_verifier.front.artifacts import Catalogue
from cloud_verifier.front.service import VerifierService
from outrider.core.errors import OutriderError
from outrider.core.sampling import SamplingParams
from outrider.wire import channels
from outrider.wire.status import error_from_rpc
from outrider.wire.ticket import Target, ticket_metadata
from outrider.wire.v1 import engine_pb2, session_pb2, session_pb2_grpc

VOCABULARY = 101
VOCABULARY_HASH = b"v" * 32
TARGET = Target("t", "w", "k")
READY = engine_pb2.EngineReady(
    vocabulary_size=VOCABULARY, eos_token_ids=[7], max_sequence=256, target=session_pb2.TargetIdentity(**vars(TARGET))
)


class ScriptedEngine:
    """Keep every request and send the events that a test gives."""

    def __init__(self) -> None:
        self.requests: list[engine_pb2.EngineRequest] = []
        self._news = asyncio.Condition()
        self._writer: asyncio.StreamWriter | None = None

    async def serve(self, sock: socket.socket) -> None:
        reader, self._writer = await asyncio.open_connection(sock=sock)
        self.send(ready=READY)
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                size = int.from_bytes(await reader.readexactly(4), "little")
                request = engine_pb2.EngineRequest.FromString(await reader.readexactly(size))
                async with self._news:
                    self.requests.append(request)
                    self._news.notify_all()

    def send(self, session_id: str = "", epoch: int = 0, **kind: Any) -> None:
        assert self._writer is not None
        self._writer.write(ipc.frame(engine_pb2.EngineEvent(session_id=session_id, epoch=epoch, **kind)))

    def commit(self, session_id: str, epoch: int, start: int, tokens: list[int], finish: int = 0) -> None:
        self.send(session_id, epoch, commit=session_pb2.Commit(epoch=epoch, start=start, token=tokens, finish=finish))

    def fail(self, session_id: str, epoch: int, error: OutriderError) -> None:
        self.send(session_id, epoch, failure=ipc.failure_event(error).failure)

    def die(self) -> None:
        assert self._writer is not None
        self._writer.close()

    async def asked(self, kind: str, epoch: int = 0) -> engine_pb2.EngineRequest:
        """Wait for the first request of this kind (and epoch) and return it."""

        def found() -> list[engine_pb2.EngineRequest]:
            return [r for r in self.requests if r.WhichOneof("kind") == kind and epoch in (0, r.epoch)]

        async with asyncio.timeout(60), self._news:
            await self._news.wait_for(found)
        return found()[0]

    async def asked_of(self, kind: str, wanted: Callable[[Any], bool]) -> Any:
        """Wait for the first wanted request of this kind and return its message."""

        def found() -> list[Any]:
            said = [getattr(r, kind) for r in self.requests if r.WhichOneof("kind") == kind]
            return [message for message in said if wanted(message)]

        async with asyncio.timeout(60), self._news:
            await self._news.wait_for(found)
        return found()[0]


class ScriptedHost(EngineHost):
    """Run a real engine host whose engine is scripted."""

    def __init__(self, config: VerifierConfig, engine: ScriptedEngine) -> None:
        super().__init__(config)
        self.engine = engine
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> engine_pb2.EngineReady:
        ours, theirs = socket.socketpair()
        self._serving = asyncio.create_task(self.engine.serve(theirs))
        return await self.connect(ours)

    async def stop(self) -> None:
        assert self._writer is not None and self._pump is not None and self._serving is not None
        self._writer.close()
        self.engine.die()
        await asyncio.wait({self._pump, self._serving}, timeout=60)


class Front:
    """Run a verifier's front on a socket, with a scripted engine behind it."""

    def __init__(self, service: VerifierService, host: ScriptedHost, channel: grpc.aio.Channel, port: int) -> None:
        self.service = service
        self.host = host
        self.engine = host.engine
        self.channel = channel
        self.port = port
        self.stub = session_pb2_grpc.VerifierStub(channel)

    @property
    def tenants(self) -> dict[str, str]:
        """Return the tenant of each live session, by session id."""
        return {session_id: stream.claims.tenant for session_id, stream in self.service.live.streams.items()}

    async def open(
        self,
        session_id: str = "s",
        epoch: int = 1,
        *,
        wait: bool = True,
        sampling: SamplingParams | None = None,
        ticket: bytes = b"",
        **fields: Any,
    ) -> Stream:
        """Return a stream whose Open was sent and, with `wait`, answered."""
        stream = Stream(self.stub.Session(metadata=ticket_metadata(ticket)))
        asked = attach(epoch, (1, 2, 3), max_tokens=32, sampling=sampling)
        await stream.send(open=session_pb2.Open(session_id=session_id, attach=asked, **fields))
        if wait:
            assert (await stream.read()).WhichOneof("kind") == "opened"
            await self.engine.asked("start", epoch)
        return stream


class Stream:
    """Act as a device's end, message by message. Pings are passed on only when asked for."""

    def __init__(self, call: Any) -> None:
        self.call = call

    async def send(self, **kind: Any) -> None:
        await self.call.write(session_pb2.ClientMessage(**kind))

    async def read(self, *, pings: bool = False) -> Any:
        async with asyncio.timeout(60):
            while True:
                message = await self.call.read()
                if message is grpc.aio.EOF or pings or message.WhichOneof("kind") != "ping":
                    return message

    async def tokens(self) -> list[int]:
        """Return those of the next Commit."""
        while not (message := await self.read()).HasField("commit"):  # a directive may come first
            pass
        return list(message.commit.token)

    async def ping(self) -> session_pb2.Ping:
        while (message := await self.read(pings=True)).WhichOneof("kind") != "ping":
            pass
        return message.ping

    async def refusal(self) -> OutriderError:
        """Return the error that ends this stream."""
        try:
            while await self.read() is not grpc.aio.EOF:
                pass
        except grpc.aio.AioRpcError as error:
            return error_from_rpc(error)
        raise AssertionError("the stream ended without an error")


async def everybody(ticket: bytes) -> None:
    return None


@contextlib.asynccontextmanager
async def front(
    model: Path,
    *,
    authorise: Callable[[bytes], Awaitable[Any]] = everybody,
    catalogue: Catalogue | None = None,
    on_first_rtt: Callable[[], None] = lambda: None,
    recorder: Any = None,
    ping_s: float = 0.05,
    silence_s: float = 20.0,
    **settings: Any,
) -> AsyncIterator[Front]:
    """Serve as a verifier's process does once its target is loaded."""
    config = VerifierConfig(model=model, **settings)
    host = ScriptedHost(config, ScriptedEngine())
    ready = await host.start()
    service = VerifierService(config, host, "v1", on_first_rtt)
    service.live.recorder = recorder
    service.serve(ready, catalogue or Catalogue(), vocabulary_hash=VOCABULARY_HASH, authorise=authorise)
    server = channels.server(admit=service.admit)
    session_pb2_grpc.add_VerifierServicer_to_server(service, server)
    port = channels.bind(server, "127.0.0.1:0")
    await server.start()
    try:
        with mock.patch.multiple(session_stream, PING_S=ping_s, SILENCE_S=silence_s):
            async with channels.channel(f"127.0.0.1:{port}") as channel:
                yield Front(service, host, channel, port)
    finally:
        await server.stop(0)
        await host.stop()


async def until(condition, timeout_s: float = 60.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up
        await asyncio.sleep(0.01)
